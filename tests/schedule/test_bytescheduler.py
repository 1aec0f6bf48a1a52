"""ByteScheduler, and the policies that are the same window with other limits: P3 and largest tail first."""

import dataclasses
import random

import pytest

from foretrain.schedule import Spec
from foretrain.simulation import simulate
from foretrain.simulation.simulation import job_on
from foretrain.tasks import Done, Ready
from tests.scenario import EXACT, by_step, layered, random_cluster, random_spec, random_workload, replay

WINDOWS = ("bytescheduler", "largest_tail_first", "p3")


def urgency(name, job):
    """Per task, its place in the order of this policy."""
    if name == "largest_tail_first":
        order = sorted(range(len(job.tasks)), key=lambda i: (-job.tails[i], job.tasks[i].first_use))
        return {task: place for place, task in enumerate(order)}
    return {task.index: task.first_use for task in job.tasks}


def plain(rng, name, size):
    """A random plan of this policy that fuses nothing."""
    plan = random_spec(rng, name, size)
    return Spec(name, {knob: value for knob, value in plan.knobs.items() if knob != "fuse"})


def limits(plan):
    knobs = plan.settings
    return (knobs["slice"], 1) if plan.name == "p3" else (knobs["partition"], knobs["credit"])


@pytest.mark.parametrize("name", WINDOWS)
def test_the_most_urgent_ready_unit_starts_on_credit_that_is_overdrawn_by_at_most_one_partition(name):
    rng = random.Random(name)
    for _ in range(150):
        workload = random_workload(rng)
        plan = plain(rng, name, workload.size)
        partition, credit = limits(plan)
        watched, _, _ = replay(workload, random_cluster(rng), plan)
        rank, sizes, waiting = urgency(name, job_on(workload, EXACT)), [g.size for g in workload.gradients], {}
        left, unsent = credit, 0
        for seen in watched.seen:
            if isinstance(seen.event, Ready):
                waiting[seen.event.task] = sizes[seen.event.task]
                unsent += sizes[seen.event.task]
            elif isinstance(seen.event, Done):
                left += seen.event.chunk.size
            for chunk in seen.chunks:
                assert left > 0  # nothing starts on exhausted credit ...
                left -= chunk.size
                unsent -= chunk.size
                assert 0 < chunk.size <= partition
                assert left > -partition  # ... so at most one partition overdraws it
                (piece,) = chunk.pieces
                assert piece.task == min((i for i in waiting if waiting[i]), key=rank.__getitem__)
                assert piece.size == min(waiting[piece.task], partition)
                waiting[piece.task] -= piece.size
            assert left <= credit
            assert left <= 0 or not unsent  # work conserving
        assert (left, unsent) == (credit, 0)


def test_the_credit_takes_effect():
    """More credit delays preemption; less leaves the link idle for a round trip."""
    workload = layered((50_000, 100), (2000, 100), (4096, 40_960))
    plans = [Spec("bytescheduler", {"partition": 1024, "credit": credit}) for credit in (1024, 8192, 65_536)]
    near = [simulate(workload, EXACT, plan).iteration_time for plan in plans]
    assert near[0] < near[1] < near[2]
    far = dataclasses.replace(EXACT, latency=10_000)
    waits = [simulate(workload, far, plan).iteration_time for plan in plans]
    assert waits[0] > waits[1] > waits[2]


def test_priority_is_first_use_and_not_registration():
    """The published plug-in numbers parameters as registered."""
    workload = layered((10, 10), (10, 10), (2048, 2048))
    backwards = dataclasses.replace(workload, gradients=workload.gradients[::-1])
    plan = Spec("bytescheduler", {"partition": 1024, "credit": 1024})
    names = []
    for one in (workload, backwards):
        run = simulate(one, EXACT, plan, steps=1)
        names.append([one.gradients[chunk.pieces[0].task].name for chunk in by_step(run.log)[0]])
    assert names[0] == names[1] == ["w1", "w0", "w0", "w1"]


def test_it_crosses_the_barrier():
    """Layer 0 runs forward when its own gradient has landed, while layer 1's is under way."""
    workload = layered((4000, 10), (10, 10), (1024, 4096))
    run = simulate(workload, EXACT, Spec("bytescheduler", {"partition": 1024, "credit": 1024}))
    # 10 of backward, a slice of w1, w0, then forward 4000 behind which the rest of w1 hides.
    assert run.iteration_time == 10 + 1024 + 1024 + 4000 + 10
    forward = [span for span in run.timeline if span.kind == "forward" and span.name == "l0"]
    sending = [span for span in run.timeline if span.kind == "communication" and span.end > forward[0].start]
    assert sending[0].start < forward[0].end


def test_fused_chunks_hold_the_most_urgent_and_reach_the_grain_or_take_all_there_is():
    rng = random.Random("fuse")
    fused = 0
    for _ in range(150):
        workload, cluster = random_workload(rng), random_cluster(rng)
        partition = rng.randint(1 << 10, max(1 << 11, workload.size))
        plan = Spec(
            "bytescheduler",
            {"partition": partition, "credit": max(1 << 10, workload.size), "fuse": rng.choice([1.0, 4.0])},
        )
        grain = min(int(plan.settings["fuse"] * job_on(workload, cluster).cost.breakeven), partition)
        watched, _, _ = replay(workload, cluster, plan)
        job = job_on(workload, cluster)
        unsent: dict[int, int] = {}
        flying = 0
        for seen in watched.seen:
            if isinstance(seen.event, Ready):
                unsent[seen.event.task] = job.tasks[seen.event.task].size
            elif isinstance(seen.event, Done):
                flying -= 1
            for chunk in seen.chunks:
                assert chunk.size >= grain or flying < 2 or sum(unsent.values()) >= grain
                places = [job.tasks[piece.task].first_use for piece in chunk.pieces]
                assert places == sorted(places)
                for piece in chunk.pieces:
                    unsent[piece.task] -= piece.size
                    if not unsent[piece.task]:
                        del unsent[piece.task]
                assert all(job.tasks[task].first_use >= places[-1] for task in unsent)
                assert grain <= chunk.size <= partition or not unsent or not grain
                flying += 1
                fused += len(chunk.pieces) > 1
        assert not unsent
    assert fused > 100


def test_an_urgent_gradient_overtakes_after_one_slice_of_p3():
    # w1 (3 slices) is released at 1 and w0 at 11: it goes between the first and the second slice.
    _, run, _ = replay(layered((1, 1), (10, 1), (1000, 3072)), EXACT, Spec("p3", {"slice": 1024}), steps=1)
    pieces = [(chunk.pieces[0].task, chunk.pieces[0].offset) for chunk in by_step(run.log)[0]]
    assert pieces == [(1, 0), (0, 0), (1, 1024), (1, 2048)]


def test_p3_pays_the_latency_of_every_slice():
    place = dataclasses.replace(EXACT, latency=500)  # of one way: twice for both halves of an all-reduce
    _, run, _ = replay(layered((1,), (1,), (4096,)), place, Spec("p3", {"slice": 1024}), steps=1)
    assert run.begins[1] == 1 + 4 * (1024 + 2 * 500) + 1
