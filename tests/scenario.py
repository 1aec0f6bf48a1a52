"""Scenarios for the tests: workloads, networks on which the arithmetic is exact, and policies under observation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from hypothesis import strategies as st

from foretrain.engine import Decision, Engine, Policy
from foretrain.network import Cluster
from foretrain.schedule import POLICIES, CostModel, Job, ScheduledPolicy, Spec
from foretrain.schedule.job import KnobValue
from foretrain.simulation import VirtualWorld
from foretrain.simulation.replay import TrainingLoop
from foretrain.simulation.simulation import carrier_on, job_on
from foretrain.simulation.world import ARRIVAL, ChunkCarrier
from foretrain.tasks import Action, Chunk, Done, Event, Ready, Start, StepBegin
from foretrain.trace import Timeline
from foretrain.units import COST_SHIFT, Time
from foretrain.workload import Gradient, Layer, Workload

EXACT = Cluster(workers=2, up=1e12, down=1e12, latency=0, overhead=0)
"""Ring all-reduce on which exchanging one byte takes exactly one picosecond and nothing else takes any time."""


def layered(
    forward: Sequence[Time], backward: Sequence[Time], sizes: Sequence[int], update: Sequence[Time] = ()
) -> Workload:
    """One gradient per layer, released when the backward pass leaves the layer."""
    update = update or [0] * len(forward)
    layers = [Layer(f"l{i}", f, b, u) for i, (f, b, u) in enumerate(zip(forward, backward, update, strict=True))]
    gradients = [Gradient(f"w{i}", size, i, sum(backward[i:])) for i, size in enumerate(sizes)]
    return Workload("layered", 1, tuple(layers), tuple(gradients))


def random_layered(rng: random.Random, most: int = 8, scale: int = 20_000, updates: bool = False) -> Workload:
    """`layered` at random: exchanging takes between a tenth and ten times as long as computing."""
    count = rng.randint(1, most)
    ratio = rng.choice((0.1, 0.5, 1, 2, 10))
    times = [[1 + int(scale * rng.random() ** 3) for _ in range(count)] for _ in range(3)]
    sizes = [1 + int(ratio * scale * rng.random() ** 3) for _ in range(count)]
    return layered(times[0], times[1], sizes, times[2] if updates else ())


def random_workload(rng: random.Random, most: int = 8, scale: int = 20_000) -> Workload:
    """Anything a workload may be: layers without and with many gradients, tied weights, releases in any order."""
    count = rng.randint(1, most)
    layers = [Layer(f"l{i}", *(int(scale * rng.random() ** 3) for _ in range(3))) for i in range(count)]
    layers.append(Layer("last", 1 + rng.randrange(scale), 1 + rng.randrange(scale)))
    end = sum(layer.backward for layer in layers)
    ratio = rng.choice((0.1, 0.5, 1, 2))
    gradients = [
        Gradient(f"w{i}", 1 + int(ratio * scale * rng.random() ** 3), rng.randrange(count + 1), rng.randint(0, end))
        for i in range(rng.randint(1, 2 * most))
    ]
    return Workload("random", rng.randint(1, 64), tuple(layers), tuple(gradients))


def random_cluster(rng: random.Random) -> Cluster:
    """Rates that divide nothing, so that every duration is rounded; about one picosecond per byte."""
    exchange = rng.choice(("all_reduce", "ps", "ps_colocated"))
    gpus = rng.choice((1, 1, 4))
    return Cluster(
        workers=rng.randint(2, 9),
        gpus=gpus,
        up=rng.uniform(0.3e12, 3e12),
        down=rng.uniform(0.3e12, 3e12),
        latency=rng.choice((0, 1, 500)),
        overhead=rng.choice((0, 7, 300)),
        exchange=exchange,
        servers=rng.randint(1, 6) if exchange == "ps" else 0,
        server_rate=rng.choice((None, rng.uniform(0.3e12, 3e12))) if exchange == "ps" else None,
        local=rng.choice((None, rng.uniform(1e12, 9e12))) if gpus > 1 else None,
    )


def random_spec(rng: random.Random, name: str, total: int) -> Spec:
    """Policy ``name`` with its tunable knobs anywhere that makes sense for ``total`` bytes."""
    knobs: dict[str, float] = {}
    for knob in POLICIES[name].knobs:
        if knob.grid:
            knobs[knob.name] = rng.choice(knob.grid)
        elif knob.kind == "size":
            knobs[knob.name] = max(int(knob.low), 1024, int(total * 10 ** rng.uniform(-2, 0.3)))
        elif knob.kind == "count" and knob.high == 1:
            knobs[knob.name] = rng.randint(0, 1)
    return Spec(name, knobs)


def one_machine(releases: Sequence[Time], work: Sequence[int], tails: Sequence[Time]) -> int:
    """The optimum of 1 | pmtn, r_i | max(C_i + q_i): the largest, over sets of jobs, of min r + Σ work + min q.

    Carlier, EJOR 1982; it is enough to look at the sets {i: r_i ≥ r and q_i ≥ q}.
    """
    jobs = list(zip(releases, work, tails, strict=True))
    found = 0
    for r in set(releases):
        late = [(p, q) for release, p, q in jobs if release >= r]
        for tail in {q for _, q in late}:
            found = max(found, r + sum(p for p, q in late if q >= tail) + tail)
    return found


@dataclass(frozen=True)
class Seen:
    """One event that a policy was given, and what it answered."""

    time: Time
    event: Event
    actions: tuple[Action, ...]

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return tuple(action.chunk for action in self.actions if isinstance(action, Start))


class Watched:
    """A policy, and everything it saw and did."""

    def __init__(self, policy: ScheduledPolicy) -> None:
        self._policy = policy
        self.barrier = policy.barrier
        self.warmup = policy.warmup
        self.seen: list[Seen] = []

    def handle(self, event: Event, now: Time) -> Sequence[Action]:
        actions = tuple(self._policy.handle(event, now))
        self.seen.append(Seen(now, event, actions))
        return actions

    @property
    def events(self) -> Iterable[Ready | Done | Chunk]:
        """In order: gradients that became ready, chunks that were started, chunks that were done."""
        for seen in self.seen:
            if isinstance(seen.event, Ready | Done):
                yield seen.event
            yield from seen.chunks


def replay(
    workload: Workload,
    place: Cluster,
    build: Callable[[Job], ScheduledPolicy] | Spec,
    steps: int = 2,
    over: Callable[[ChunkCarrier], ChunkCarrier] = lambda carrier: carrier,
) -> tuple[Watched, TrainingLoop, Timeline]:
    """Runs a policy, watched, ``over`` what makes another of the network."""
    job = job_on(workload, place)
    policy = Watched(build.build(job) if isinstance(build, Spec) else build(job))
    timeline = Timeline()
    carrier = carrier_on(place, job, lambda task: run.landed(task), timeline)
    world, served = VirtualWorld(over(carrier)), place.exchange != "all_reduce"
    run = TrainingLoop(workload, job, policy, world, steps, timeline, served=served)
    run.begin()
    world.run()
    run.raise_if_stalled()
    return policy, run, timeline


class SlowLink:
    """One pipe, ``slowness`` times as slow as the model says."""

    def __init__(self, cost: CostModel) -> None:
        self.cost, self.slowness, self.free = cost, 1.0, 0

    def carry(self, chunk: Chunk, world: VirtualWorld, done: Callable[[Chunk], None]) -> None:
        self.free = max(world.now(), self.free) + round(self.cost.time(chunk.size) * self.slowness)
        world.schedule(self.free, ARRIVAL, done, chunk)


class Trainer:
    """Backward passes only, with gradients and a link that may change from step to step."""

    def __init__(
        self, workload: Workload, plan: Spec, overhead: Time = 0, watch: Callable[[Policy], Policy] = lambda one: one
    ) -> None:
        self.job = Job.of(workload, CostModel(overhead, 1 << COST_SHIFT))
        self.link = SlowLink(self.job.cost)
        self.world = VirtualWorld(self.link)
        self.landed: list[int] = []
        self.engine = Engine(watch(plan.build(self.job)), self.world, self.job.tasks, self.landed.append)
        self.steps = 0

    def step(self, releases: Sequence[Time]) -> list[tuple[Time, Chunk]]:
        """Return what was started in one step and when, counted from its beginning."""
        began, before = self.world.now(), len(self.engine.log)
        self.engine.post(StepBegin(self.steps))
        for task in sorted(range(len(releases)), key=lambda i: (releases[i], self.job.tasks[i].first_use)):
            self.world.call_at(began + releases[task], lambda task=task: self.engine.post(Ready(task)))
        self.landed.clear()
        self.world.run()
        assert sorted(self.landed) == list(range(len(releases)))
        self.steps += 1
        return [(decision.time - began, decision.chunk) for decision in self.engine.log[before:]]


def kappa(place: Cluster) -> Fraction:
    """κ in seconds per byte, as exactly as it is known."""
    return Fraction(place.cost.per_byte, 10**12 << COST_SHIFT)


def by_step(log: Iterable[Decision]) -> dict[int, list[Chunk]]:
    """Chunks of each step, in the order of their start."""
    steps: dict[int, list[Chunk]] = {}
    for decision in log:
        steps.setdefault(decision.step, []).append(decision.chunk)
    return steps


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Any policy with any of its knobs anywhere in their ranges."""
    name = draw(st.sampled_from(sorted(POLICIES)))
    knobs: dict[str, KnobValue] = {}
    for knob in POLICIES[name].knobs:
        if draw(st.booleans()):
            low, high = knob.low, min(knob.high, 10**12)
            values = st.floats(low, high) if knob.kind == "factor" else st.integers(int(low), int(high))
            knobs[knob.name] = draw(st.lists(values).map(tuple) if knob.kind == "sizes" else values)
    return Spec(name, knobs)


sizes = st.integers(1, 50_000)
times = st.integers(0, 20_000)


@st.composite
def workloads(draw: st.DrawFn, monotone: bool = False, most: int = 5) -> Workload:
    """Workloads that shrink: `layered` if ``monotone``, otherwise anything."""
    count = draw(st.integers(1, most))
    column = st.lists(times, min_size=count, max_size=count)
    forward, backward = draw(column), draw(column)
    forward[-1] += 1
    if monotone:
        return layered(forward, backward, draw(st.lists(sizes, min_size=count, max_size=count)))
    layers = [Layer(f"l{i}", f, b, u) for i, (f, b, u) in enumerate(zip(forward, backward, draw(column), strict=True))]
    gradient = st.tuples(sizes, st.integers(0, count - 1), st.integers(0, sum(backward)))
    gradients = [
        Gradient(f"w{i}", *row) for i, row in enumerate(draw(st.lists(gradient, min_size=1, max_size=2 * most)))
    ]
    return Workload("drawn", 1, tuple(layers), tuple(gradients))
