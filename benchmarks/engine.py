"""Decisions per second: engine and policy, in a world that delivers every chunk at once.

Each of n tasks is cut into 4 chunks by the policies that cut; those that fuse decide less often, so the time per task
is shown as well. All tasks become ready; then chunk after chunk is started and delivered until none is left. The world
costs next to nothing, so the time is the engine's and the policy's. The limit is the interpreter: some 1.3 µs of
bytecode a chunk, of which its five structs (piece, chunk, action, decision, event) are 0.16 µs.

The baseline, in the same interleaved run, is a list of tasks searched for the most urgent one at every decision, on
1,000 tasks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from measure import finish, interleaved, options, spread
from rich.progress import track

from foretrain.engine import Engine
from foretrain.schedule import POLICIES, CostModel, Job, Spec
from foretrain.tasks import Action, Chunk, Done, Event, Piece, Ready, Start, StepBegin
from foretrain.units import Time, per_byte
from foretrain.workload import Gradient, Layer, Workload

SIZE, CHUNKS, TASKS = 400_000, 4, 10_000


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
    return Job.of(Workload("layers", 1, layers, gradients), CostModel(50_000_000, per_byte(1.25e9)))


class Case:
    """One policy, planned and past its warm-up; `step` runs one more step."""

    def __init__(self, name: str, work: Job) -> None:
        knobs = {k.name for k in POLICIES[name].knobs} & {"partition", "slice"} if name in POLICIES else set()
        policy = Spec(name, dict.fromkeys(knobs, SIZE // CHUNKS)).build(work) if name in POLICIES else Naive(work)
        self.work, self.world = work, Loopback()
        self.rates: list[float] = []
        self.seconds: list[float] = []
        self.policy = policy
        for _ in range(getattr(policy, "warmup", 0)):
            self.step()
        self.rates.clear()

    def step(self) -> None:
        """One step; appends decisions per second to ``rates``."""
        # A new engine each time: its log of all steps would otherwise measure the memory allocator.
        engine = Engine(self.policy, self.world, self.work.tasks)
        began = time.perf_counter()
        engine.post(StepBegin(len(self.rates)))
        for task in self.work.by_release:
            self.world.clock += 1_000_000
            engine.post(Ready(task))
        self.world.run()
        seconds = time.perf_counter() - began
        self.seconds.append(seconds)
        self.rates.append(len(engine.log) / seconds)


def main() -> None:
    """Prints each policy's rate, the curve over the number of tasks, and the RESULT line."""
    arguments = options(__doc__ or "")
    # TAC and PACE plan in O(n²) before the first step, a minute each at this size.
    names = [name for name in POLICIES if not (arguments.quick and name in ("tictac", "tic", "pace"))]
    works = {size: job(size) for size in (1000, TASKS)}
    cases = {"naive": Case("naive", works[1000])}
    cases |= {name: Case(name, works[TASKS]) for name in track(names, "planning", transient=True)}
    samples = 15
    interleaved({name: case.step for name, case in cases.items()}, samples=samples, warmup=1)
    rates = {name: case.rates[-samples:] for name, case in cases.items()}
    for name, values in rates.items():
        ratio = median(values) / median(rates["naive"])
        count = len(cases[name].work.tasks)
        each = median(cases[name].seconds[-samples:]) / count * 1e6
        print(
            f"{name:20s}{count:7,d} tasks {spread(values):>32s} decisions/s {ratio:6.1f} × naive {each:6.2f} µs a task"
        )
    curve = {}
    for size in (100, 1000, 10_000) if arguments.quick else (100, 1000, 10_000, 100_000):
        case = Case("bytescheduler", job(size))
        for _ in range(max(15, 15 * 1000 // size)):
            case.step()
        curve[size] = 1 / median(case.rates)
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
