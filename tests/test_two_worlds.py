"""The same policy decides the same in the simulated and in the real world."""

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import get_args

import pytest

from foretrain.network import Hop
from foretrain.plugins.torch import WallWorld
from foretrain.schedule import CostModel, Job, ScheduledPolicy, script, spec
from foretrain.simulation import VirtualWorld
from foretrain.simulation.links import Pipes
from foretrain.simulation.replay import TrainingLoop
from foretrain.tasks import Action, Chunk, Event, Op, StepBegin
from foretrain.trace import Timeline
from foretrain.units import MILLISECOND, Time, per_byte
from foretrain.workload import Gradient, Layer, Workload

# A chunk of 1 kB takes 2 ms. Under each of these schedules any two events are at least 10 ms apart (a test says so), so
# that a thread that is late changes times but no decisions.
APART = 10 * MILLISECOND
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


class Watched:
    """A policy that remembers when it was told something that can change its mind."""

    def __init__(self, policy: ScheduledPolicy) -> None:
        self.policy, self.barrier, self.warmup = policy, policy.barrier, policy.warmup
        self.times: list[Time] = []

    def handle(self, event: Event, now: Time) -> Sequence[Action]:
        if type(event) is not StepBegin:
            self.times.append(now)
        return self.policy.handle(event, now)


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


def wall(policy_of: Callable[[Job], ScheduledPolicy]) -> TrainingLoop:
    finished, work = threading.Event(), job()
    with WallWorld(WIRE) as world:
        replay = TrainingLoop(workload(), work, policy_of(work), world, STEPS, finished=finished.set)
        world.call_at(0, replay.begin)
        world.run_until(finished, timeout=60)
    return replay


def decided(policy_of: Callable[[Job], ScheduledPolicy], expected: list[tuple[int, Chunk]]) -> list[tuple[int, Chunk]]:
    """What was decided on the wall clock. A machine that stalls for 10 ms may change a decision, but not five times."""
    found = chunks(wall(policy_of))
    for _ in range(4):
        if found == expected:
            break
        found = chunks(wall(policy_of))
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_same_decisions_in_both_worlds(schedule: str):
    simulated, policy = virtual(schedule)
    assert min(b - a for a, b in pairwise(sorted(policy.times))) >= APART
    assert decided(spec(schedule).build, chunks(simulated)) == chunks(simulated)


def test_a_log_of_the_virtual_world_runs_again_in_the_real_one():
    recorded, _ = virtual(SCHEDULES[-2])
    plan = script.of_step(recorded.log, STEPS - 1)
    expected = [(step, chunk) for step in range(STEPS) for chunk in plan]
    assert decided(lambda work: script.Script(plan, work.tasks), expected) == expected


def test_the_same_scenario_gives_the_same_bytes_of_timeline():
    first, second = Timeline(), Timeline()
    virtual(SCHEDULES[-2], first)
    virtual(SCHEDULES[-2], second)
    assert len(first) > 0
    assert first.to_bytes() == second.to_bytes()
