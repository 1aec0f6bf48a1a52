"""A policy decides the same in the simulator and in the coordinator of a real job."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import get_args

import pytest

from foretrain.comm.coordinator.coordinator import Coordinator
from foretrain.comm.coordinator.protocol import CollectiveCommand
from foretrain.network import Hop
from foretrain.schedule import CostModel, Job, ScheduledPolicy, Spec, script, spec
from foretrain.simulation import VirtualWorld
from foretrain.simulation.links import Pipes
from foretrain.simulation.replay import TrainingLoop
from foretrain.tasks import Chunk, Done, Event, Op, Ready, StepBegin
from foretrain.trace import Timeline
from foretrain.units import MILLISECOND, per_byte
from foretrain.workload import Gradient, Layer, Workload
from tests.scenario import Watched

PATIENCE = 60
"""Seconds that a busy machine may take for a decision."""
WIRE = Hop("wire", per_byte(0.5e6))
STEPS = 2
SIZES = (25_000, 48_000, 9_000, 15_000)
SCHEDULES = (
    "fifo",
    "ddp(bucket=60kB, first=30kB)",
    "p3(slice=18kB)",
    "tictac",
    "mgwfbp",
    "dear(group=60kB)",
    "pace(partition=18kB, credit=20kB)",
    "bytescheduler(partition=18kB, credit=20kB)",
    "largest_tail_first(partition=18kB, credit=18kB)",
)


def workload() -> Workload:
    layers = tuple(Layer(f"layer{i}", 20 * MILLISECOND, 46 * MILLISECOND, 2 * MILLISECOND) for i in range(len(SIZES)))
    releases = [46 * MILLISECOND * (len(SIZES) - i) for i in range(len(SIZES))]
    gradients = tuple(Gradient(f"w{i}", size, i, releases[i]) for i, size in enumerate(SIZES))
    return Workload("small", 1, layers, gradients)


def job() -> Job:
    return Job.of(workload(), CostModel(0, WIRE.cost))


def chunks(replay: TrainingLoop) -> list[tuple[int, Chunk]]:
    return [(decision.step, decision.chunk) for decision in replay.log]


def virtual(schedule: str, timeline: Timeline | None = None) -> tuple[TrainingLoop, Watched]:
    work = job()
    routes = dict.fromkeys(get_args(Op), (WIRE,))
    world = VirtualWorld(Pipes(routes, timeline, lambda chunk: (work.tasks[chunk.pieces[0].task].name, 0)))
    policy = Watched(spec(schedule).build(work))
    replay = TrainingLoop(workload(), work, policy, world, STEPS, timeline)
    replay.begin()
    world.run()
    replay.raise_if_stalled()
    return replay, policy


class ScriptedLink:
    """A `CommandExecutor` whose chunks complete when the test says so."""

    def __init__(self) -> None:
        self.sequence, self.digest, self.started = 0, b"", 0
        self._open: list[tuple[CollectiveCommand, Callable[[CollectiveCommand], None]]] = []
        self._changed = threading.Condition()

    def start(self, command: CollectiveCommand, done: Callable[[CollectiveCommand], None]) -> None:
        with self._changed:
            self.sequence += 1
            self.started += 1
            self._open.append((command, done))
            self._changed.notify_all()

    def last(self) -> str:
        return f"last sequence {self.sequence - 1}"

    def complete(self, chunk: Chunk) -> None:
        """Wait until ``chunk`` was started, and complete it."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(command.chunk == chunk for command, _ in self._open), PATIENCE)
            place = next(place for place, (command, _) in enumerate(self._open) if command.chunk == chunk)
            command, done = self._open.pop(place)
        done(command)

    def wait(self, count: int) -> None:
        """Wait until ``count`` chunks were started."""
        with self._changed:
            self._changed.wait_for(lambda: self.started >= count, PATIENCE)


def coordinated(policy: Spec, events: Sequence[Event], count: int) -> list[tuple[int, Chunk]]:
    """Return ``count`` decisions of the coordinator of a job of one rank, on its own thread, after these events."""
    failures, link = [], ScriptedLink()
    coordinator = Coordinator(
        job(),
        policy,
        link,
        {},
        peer_timeout=60,
        stall_timeout=60,
        check_every=0,
        failed=failures.append,
        origin=time.perf_counter_ns(),
    )
    try:
        for event in events:
            if isinstance(event, StepBegin):
                coordinator.open(event.step, False)
            elif isinstance(event, Ready):
                coordinator.ready(event.task, True)
            elif isinstance(event, Done):
                link.complete(event.chunk)
        link.wait(count)
    finally:
        coordinator.close()
    assert not failures
    return [(decision.step, decision.chunk) for decision in coordinator.log]


class Recorded(Spec):
    """A schedule that repeats recorded chunks in each step."""

    def __init__(self, plan: Sequence[Chunk]) -> None:
        super().__init__("fifo")
        object.__setattr__(self, "plan", plan)

    def build(self, job: Job) -> ScheduledPolicy:
        return script.Script(self.plan, job.tasks)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_coordinator_decides_what_the_simulator_forecasts(schedule: str):
    simulated, policy = virtual(schedule)
    expected = chunks(simulated)
    assert coordinated(spec(schedule), [seen.event for seen in policy.seen], len(expected)) == expected


def test_the_coordinator_repeats_a_recorded_log():
    recorded, _ = virtual(SCHEDULES[-2])
    plan = script.of_step(recorded.log, STEPS - 1)
    expected = [(step, chunk) for step in range(STEPS) for chunk in plan]
    events = [
        event
        for step in range(STEPS)
        for event in (StepBegin(step), *map(Ready, reversed(range(len(SIZES)))), *map(Done, plan))
    ]
    assert coordinated(Recorded(plan), events, len(expected)) == expected


def test_the_same_scenario_gives_the_same_bytes_of_timeline():
    first, second = Timeline(), Timeline()
    virtual(SCHEDULES[-2], first)
    virtual(SCHEDULES[-2], second)
    assert len(first) > 0
    assert first.to_bytes() == second.to_bytes()
