"""Exchanges by a policy: the executor decides as the replay of the same workload does, however frames come."""

from itertools import groupby
from typing import get_args

import pytest

from foretrain.comm.observation import StepProfile, workload_of
from foretrain.errors import Disagreement, StallError
from foretrain.live.event_log import STREAM, ModelAnnouncement
from foretrain.network import Hop
from foretrain.schedule import POLICIES, Job
from foretrain.simulation import VirtualWorld
from foretrain.simulation.links import Pipes
from foretrain.simulation.replay import TrainingLoop
from foretrain.tasks import Op
from foretrain.units import NANOSECOND, moving
from tests.live.player import PER_BYTE, Constant, folding_of, play, shuffled

STEPS = 6
SIZES = (25_011, 48_007, 9_000, 15_013, 700)
NAMES = ("embedding.weight", "first.weight", "second.weight", "second.other", "head.weight")
SEEN = StepProfile(
    order=[0, 1, 2, 3, 4],
    uses=[time * NANOSECOND for time in (0, 9_001, 17_003, 18_007, 31_013)],
    forward=40_009 * NANOSECOND,
    releases=[time * NANOSECOND for time in (80_021, 61_027, 44_029, 39_041, 10_007)],
    backward=80_021 * NANOSECOND,
    update=1_009 * NANOSECOND,
    fires=[1] * 5,
    passes=1,
)
SCHEDULES = tuple(
    {"ddp": "ddp(bucket=60kB, first=20kB)", "fusion": "fusion(threshold=30kB, cycle=20us)"}.get(name, name)
    for name in POLICIES
)


def announced(schedule, ranks, sizes=SIZES):
    return ModelAnnouncement("Small", schedule, ranks, NAMES, sizes, SEEN)


def takes(what, size=0):
    return moving(size, PER_BYTE)


def training(schedule, ranks, steps=STEPS):
    """A rank that computes what was observed, and lets the policy exchange its gradients."""
    workload = workload_of(SEEN, NAMES, SIZES, "Small", "here")
    job = Job.of(workload, Constant(None).cost(ranks))
    barrier = POLICIES[schedule.partition("(")[0]].barrier

    def forward(rank, landed):
        for place in range(len(workload.layers)):
            for task in (task for task, owner in enumerate(job.layers) if owner == place):
                rank.wait(1 if barrier else 10 + place, landed[task])
        if barrier:
            rank.run(1, workload.update)
        for place, layer in enumerate(workload.layers):
            if not barrier:
                rank.run(10 + place, layer.update, copied=layer.update)  # it shares no GPU in the replay
                rank.wait(1, rank.record(10 + place))
            rank.run(1, layer.forward)

    def program(rank):
        rank.tasks(1, announced(schedule, ranks))
        for _ in range(steps):
            rank.begin(1, 1)
            landed, at = {}, 0
            for release, tasks in groupby(job.by_release, key=job.releases.__getitem__):
                rank.run(1, release - at)
                at = release
                landed |= {task: rank.ready(1, 1, task) for task in tasks}
            forward(rank, landed)
        yield rank.ask(STREAM, stream=1)

    return program


def replayed(plan):
    """The same in the replay, each operation behind θ on one pipe."""
    wire = Hop("wire", PER_BYTE, 7)
    world = VirtualWorld(Pipes(dict.fromkeys(get_args(Op), (wire,)), None, lambda chunk: ("", 0)))
    replay = TrainingLoop(plan.workload, plan.job, plan.schedule.build(plan.job), world, STEPS)
    replay.begin()
    world.run()
    replay.raise_if_stalled()
    return replay


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_executor_decides_as_the_replay_does(schedule):
    program = training(schedule, (0, 1))
    played = play(program, program, duration=takes)
    (exchange,) = played.trace.schedules
    replay = replayed(exchange.plan)
    expected = [decision for decision in replay.log if decision.step < STEPS]
    assert len(expected) >= STEPS
    assert list(exchange.log) == expected
    assert exchange.begins == replay.begins[:STEPS]
    assert played.times() == [replay.begins[STEPS]]


@pytest.mark.parametrize("schedule", ["bytescheduler(partition=16kB, credit=20kB)", "prophet", "fifo"])
def test_the_order_of_frames_decides_nothing(schedule):
    programs = [training(schedule, (0, 1, 2))] * 3
    first = shuffled(0, *programs, duration=takes, slowdown=1.3, kept=None)
    assert first.log
    for seed in range(1, 8):
        assert shuffled(seed, *programs, duration=takes, slowdown=1.3, kept=None).outcome() == first.outcome()


def test_one_rank_stands_for_all():
    program = training("bytescheduler(partition=16kB, credit=20kB)", (0, 1, 2, 3))
    folded = play(program, duration=takes, folding=folding_of(0, 0, 0, 0))
    everyone = play(*[program] * 4, duration=takes)
    assert folded.times() == everyone.times()
    assert folded.log == everyone.log


def test_a_task_is_ready_when_the_last_member_is():
    def program(rank):
        rank.tasks(1, announced("fifo", (0, 1)))
        rank.begin(1, 1)
        rank.run(1, 1_000 * (rank.number + 1))
        rank.wait(1, rank.ready(1, 1, 2))
        yield rank.ask(STREAM, stream=1)

    played = play(program, program, duration=100, kept=None)
    assert played.log == [(2_007, "all_reduce", SIZES[2], (0, 1), None)]
    assert played.times(0) == played.times(1) == [2_107]
    (shown,) = (one for one in played.trace.rank_traces[1].activities() if one.kind == "communication")
    assert (shown.name, shown.stream, shown.start, shown.end) == ("all_reduce second.weight", 99, 2_000, 2_107)


def test_communication_of_a_policy_slows_computing():
    def program(rank):
        rank.tasks(1, announced("fifo", (0,) if rank.number else (0, 1)))
        rank.begin(1, 1)
        rank.ready(1, 1, 2)
        rank.run(2, 1_000)
        yield rank.ask(STREAM, stream=2)

    played = play(program, duration=493, slowdown=2.0, folding=folding_of(0, 0))
    assert played.times() == [1_250]


def test_members_with_other_parameters_are_told():
    def program(rank):
        rank.tasks(1, announced("fifo", (0, 1), SIZES if rank.number else SIZES[::-1]))
        yield rank.ask(STREAM, stream=1)

    with pytest.raises(Disagreement, match="has other parameters than"):
        play(program, program)


def test_a_stall_says_what_has_not_landed():
    def program(rank):
        rank.tasks(1, announced("fifo", (0, 1)))
        if not rank.number:
            rank.begin(1, 1)
            rank.wait(1, rank.ready(1, 1, 0))
            yield rank.ask(STREAM, stream=1)
        yield rank.frame()

    with pytest.raises(StallError, match=r"rank 0 made task 'embedding.weight' ready in round 0 .*, rank 1 did not"):
        play(program, program)
