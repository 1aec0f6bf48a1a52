"""What holds for every policy, whatever the workload, the cluster and the knobs."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.errors import StallError
from foretrain.schedule import POLICIES, Spec
from foretrain.simulation import simulate
from foretrain.simulation.simulation import job_on
from tests.scenario import (
    EXACT,
    Trainer,
    by_step,
    layered,
    random_cluster,
    random_spec,
    random_workload,
    replay,
    workloads,
)


def covered(chunks, op):
    """Per task the intervals that chunks of ``op`` carry, in order."""
    found = {}
    for chunk in chunks:
        if chunk.op == op:
            for piece in chunk.pieces:
                found.setdefault(piece.task, []).append((piece.offset, piece.offset + piece.size))
    return {task: sorted(spans) for task, spans in found.items()}


def tile(spans, size):
    """Whether ``spans`` cover ``[0, size)`` without a gap, an overlap or an empty piece."""
    starts, ends = [start for start, _ in spans], [end for _, end in spans]
    return [0, *ends] == [*starts, size] and all(start < end for start, end in spans)


def assert_every_byte_moves_once(workload, log):
    for step, chunks in by_step(log).items():
        assert all(chunk.size == sum(piece.size for piece in chunk.pieces) for chunk in chunks)
        whole, scattered, gathered = (covered(chunks, op) for op in ("all_reduce", "reduce_scatter", "all_gather"))
        assert whole.keys().isdisjoint(scattered)
        for index, gradient in enumerate(workload.gradients):
            if index in whole:
                assert tile(whole[index], gradient.size), (step, index)
            else:
                assert tile(scattered[index], gradient.size), (step, index)
                assert tile(gathered[index], gradient.size), (step, index)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40)
@given(workload=workloads(), seed=st.integers(0, 2**32))
def test_every_byte_moves_once_in_every_step(name, workload, seed):
    rng = random.Random(seed)
    run = simulate(workload, random_cluster(rng), random_spec(rng, name, workload.size), trace=False)
    assert sorted(by_step(run.log)) == list(range(len(run.begins) - 1))
    assert_every_byte_moves_once(workload, run.log)


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_scenario_gives_the_same_bytes_and_decisions_with_a_timeline_and_without(name):
    rng = random.Random(name)
    for _ in range(20):
        workload, place = random_workload(rng), random_cluster(rng)
        plan = random_spec(rng, name, workload.size)
        once, again = simulate(workload, place, plan), simulate(workload, place, plan)
        assert once.timeline.to_bytes() == again.timeline.to_bytes()
        assert len(once.timeline) > 0
        unseen = simulate(workload, place, plan, trace=False)
        assert (once.log, once.begins) == (again.log, again.begins) == (unseen.log, unseen.begins)


@pytest.mark.parametrize("name", POLICIES)
def test_one_byte_in_one_layer_is_enough(name):
    run = simulate(layered((3,), (5,), (1,), (2,)), EXACT, name)
    assert run.iteration_time >= run.bound.time == 5 + 1 + 2 + 3


@pytest.mark.parametrize("name", POLICIES)
def test_defaults_lie_within_their_own_ranges(name):
    knobs = POLICIES[name].knobs
    assert Spec(name, {knob.name: knob.default for knob in knobs}).settings == Spec(name).settings
    for knob in knobs:
        for edge in (knob.low, knob.high, *knob.grid):
            value = (edge,) if knob.kind == "sizes" else edge
            assert Spec(name, {knob.name: value}).settings[knob.name] == value


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("edge", ["low", "high"])
def test_knobs_work_at_the_edges_of_their_ranges(name, edge):
    rng = random.Random(name)
    for _ in range(4):
        workload = random_workload(rng, most=4, scale=2000)
        for knob in POLICIES[name].knobs:
            if knob.name != "profile":
                value = getattr(knob, edge)
                plan = Spec(name, {knob.name: (value,) if knob.kind == "sizes" else value})
                run = simulate(workload, EXACT, plan, trace=False)
                assert_every_byte_moves_once(workload, run.log)


@pytest.mark.parametrize("name", POLICIES)
def test_decisions_repeat_after_the_warmup(name):
    """Same chunks in the same order, at the same time after the backward pass began."""
    rng = random.Random(name)
    for _ in range(20):
        workload = random_workload(rng)
        run = simulate(workload, random_cluster(rng), random_spec(rng, name, workload.size), steps=3, trace=False)
        rows = {}
        for decision in run.log:
            rows.setdefault(decision.step, []).append((decision.time - run.begins[decision.step], decision.chunk))
        assert rows[max(rows)] == rows[max(rows) - 1]


class Silent:
    """Never sends one task."""

    warmup = 0

    def __init__(self, job, name, missing, barrier):
        self._policy = Spec(name).build(job)
        self._missing = missing
        self.barrier = barrier

    def handle(self, event, now):
        if getattr(event, "task", None) == self._missing:
            return ()
        return self._policy.handle(event, now)


@pytest.mark.parametrize("barrier", [True, False])
def test_a_policy_that_never_sends_is_named_with_layer_and_task(barrier):
    workload = layered((1, 1), (1, 1), (7, 9))
    with pytest.raises(StallError, match="step 0 of 2 cannot go on") as caught:
        replay(workload, EXACT, lambda job: Silent(job, "fifo", 1, barrier))
    assert caught.value.waits == (
        "layer 'l1': its forward waits for 1 of its 1 gradients",
        "task 'w1': 9 of 9 bytes have not landed (9 never started, 0 reduced but not gathered)",
    )
    assert all(wait in str(caught.value) for wait in caught.value.waits)


def test_the_job_orders_by_first_use_and_by_release():
    rng = random.Random(1)
    for _ in range(200):
        workload = random_workload(rng)
        job = job_on(workload, EXACT)
        layers = [workload.gradients[i].layer for i in job.by_urgency]
        assert layers == sorted(layers)
        releases = [workload.gradients[i].release for i in job.by_release]
        assert releases == sorted(releases)
        assert sorted(job.by_urgency) == sorted(job.by_release) == list(range(len(job.tasks)))
        assert [job.tasks[i].first_use for i in job.by_urgency] == list(range(len(job.tasks)))


@pytest.mark.parametrize("name", POLICIES)
def test_of_what_is_ready_the_first_by_priority_is_sent_first(name):
    """Gradients come while the first of them is still on its way; weights are first used in the order of tasks."""
    run = Trainer(layered((9, 5, 3, 1), (1, 1, 1, 1), (50_000_000, 20_000_000, 40_000_000, 30_000_000)), Spec(name))
    policy = Spec(name).build(run.job)
    for _ in range(policy.warmup):
        run.step([3, 2, 1, 0])
    chunks = [chunk for when, chunk in run.step([3, 2, 1, 0]) if when > 3]
    for op, order in policy.priorities.items():
        places = [min(order.index(piece.task) for piece in chunk.pieces) for chunk in chunks if chunk.op == op]
        assert len(set(places)) >= 3
        assert places == sorted(places)
