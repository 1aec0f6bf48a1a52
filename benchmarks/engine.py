"""Decisions per second: engine and policy, in a world that delivers every chunk at once.

Each of n tasks is cut into 4 chunks. All become ready; then chunk after chunk is started and delivered until none is
left. The world costs next to nothing, so the time is the engine's and the policy's. The baseline, in the same
interleaved run, is a list of tasks searched for the most urgent one at every decision, on 1,000 tasks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from measure import finish, interleaved, options, spread

from foretrain.engine import Engine
from foretrain.schedule import POLICIES, Cost, Job, Spec
from foretrain.tasks import Action, Chunk, Done, Event, Piece, Ready, Start, StepBegin
from foretrain.units import Time, per_byte
from foretrain.workload import Gradient, Layer, Workload

SIZE, CHUNKS = 400_000, 4


class Loopback:
    """A world in which the clock ticks when something is delivered."""

    def __init__(self) -> None:
        self.queue: deque[tuple[Callable[..., None], tuple[Chunk, ...]]] = deque()
        self.clock: Time = 0

    def now(self) -> Time:
        return self.clock

    def call_at(self, when: Time, call: Callable[[], None]) -> None:
        self.queue.append((call, ()))

    def start(self, chunk: Chunk, done: Callable[[Chunk], None]) -> None:
        self.queue.append((done, (chunk,)))

    def run(self) -> None:
        while self.queue:
            call, arguments = self.queue.popleft()
            self.clock += 1_000_000
            call(*arguments)


class Naive:
    """The most urgent ready task, found by looking at all of them."""

    def __init__(self, job: Job) -> None:
        self.tasks, self.left, self.credit = job.tasks, {}, CHUNKS * SIZE

    def handle(self, event: Event, now: Time) -> Sequence[Action]:
        if type(event) is Done:
            self.credit += event.chunk.size
        elif type(event) is Ready:
            self.left[event.task] = self.tasks[event.task].size
        starts = []
        while self.left and self.credit > 0:
            task = min(self.left, key=lambda i: self.tasks[i].first_use)
            size = min(SIZE // CHUNKS, self.left[task])
            starts.append(Start(Chunk("all_reduce", (Piece(task, SIZE - self.left[task], size),), size)))
            self.credit -= size
            self.left[task] -= size
            if not self.left[task]:
                del self.left[task]
        return starts


def job(count: int) -> Job:
    """``count`` equal layers."""
    layers = tuple(Layer(f"layer{i}", 10, 20, 1) for i in range(count))
    gradients = tuple(Gradient(f"layer{i}.weight", SIZE, i, 20 * (count - i)) for i in range(count))
    return Job.of(Workload("layers", 1, layers, gradients), Cost(50_000_000, per_byte(1.25e9)))


def decide(name: str, work: Job, steps: int = 1) -> tuple[int, float]:
    """Decisions made and seconds taken over the steps after the policy's warm-up."""
    knobs = {k.name for k in POLICIES[name].knobs} & {"partition", "slice"} if name != "naive" else set()
    policy = Naive(work) if name == "naive" else Spec(name, dict.fromkeys(knobs, SIZE // CHUNKS)).build(work)
    world = Loopback()
    engine = Engine(policy, world, work.tasks)
    warmup = getattr(policy, "warmup", 0)
    before, began = 0, 0.0
    for step in range(warmup + steps):
        if step == warmup:
            before, began = len(engine.log), time.perf_counter()
        engine.post(StepBegin(step))
        for task in work.by_release:
            world.clock += 1_000_000
            engine.post(Ready(task))
        world.run()
    return len(engine.log) - before, time.perf_counter() - began


def main() -> None:
    """Prints each policy's rate, the curve over the number of tasks, and the RESULT line."""
    arguments = options(__doc__ or "")
    count = 10_000
    names = (
        ("bytescheduler", "prophet") if arguments.quick else tuple(n for n in POLICIES if n not in ("tictac", "pace"))
    )
    # TAC and PACE plan in O(n²) when they are built, so they are measured on fewer tasks.
    sizes = {"naive": 1000, "tictac": 300, "pace": 1000} | dict.fromkeys(names, count)
    if arguments.quick:
        sizes = {name: sizes[name] for name in ("naive", *names)}
    works = {size: job(size) for size in set(sizes.values())}
    rates: dict[str, list[float]] = {name: [] for name in sizes}

    def case(name: str) -> Callable[[], None]:
        def run() -> None:
            made, seconds = decide(name, works[sizes[name]])
            rates[name].append(made / seconds)

        return run

    samples = 15
    interleaved({name: case(name) for name in sizes}, samples=samples, warmup=1)
    rates = {name: values[-samples:] for name, values in rates.items()}
    for name, values in rates.items():
        ratio = median(values) / median(rates["naive"])
        print(f"{name:20s} {sizes[name]:6d} tasks  {spread(values):>32s} decisions/s  {ratio:8.1f} × naive")
    curve = {}
    for size in (100, 1000, 10_000) if arguments.quick else (100, 1000, 10_000, 100_000):
        work = job(size)
        costs = [
            seconds / made
            for made, seconds in (decide("bytescheduler", work, max(1, 10_000 // size)) for _ in range(7))
        ]
        curve[size] = min(costs)
        print(f"bytescheduler at {size:7,d} tasks: {curve[size] * 1e6:.2f} µs per chunk")
    best = median(rates["bytescheduler"])
    values = {
        "bytescheduler_decisions_per_s": best,
        "prophet_decisions_per_s": median(rates["prophet"]),
        "bytescheduler_vs_naive": best / median(rates["naive"]),
        "cost_10000_vs_100_tasks": curve[10_000] / curve[100],
    }
    finish(arguments, "engine", values, {"rates": rates, "seconds_per_chunk": curve})


if __name__ == "__main__":
    main()
