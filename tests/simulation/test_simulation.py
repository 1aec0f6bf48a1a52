"""A run as users see it: what it measures, what its timeline shows, and what is refused."""

import json
import random
from itertools import pairwise

import pytest

from foretrain.errors import ConfigError
from foretrain.schedule import POLICIES, Spec
from foretrain.simulation import simulate
from foretrain.trace import Span
from tests.scenario import EXACT, layered, random_cluster, random_spec, random_workload

TWO = layered((5, 7), (20, 10), (100, 4), (3, 2))
"""Backward: layer 1 until 10, layer 0 until 30. Sending takes 4 and 100."""


def spans(run, *lanes):
    return [(span.name, span.kind, span.start, span.end) for span in run.timeline if span.lane in lanes]


def test_a_step_by_hand_across_the_barrier():
    run = simulate(TWO, EXACT, "bytescheduler", steps=1)
    assert spans(run, "wire") == [("w1", "communication", 10, 14), ("w0", "communication", 30, 130)]
    assert spans(run, "optimizer") == [("l1", "update", 14, 16), ("l0", "update", 130, 133)]
    assert spans(run, "gpu") == [
        ("l1", "backward", 0, 10),
        ("l0", "backward", 10, 30),
        ("l0", "wait", 30, 133),
        ("l0", "forward", 133, 138),
        ("l1", "forward", 138, 145),
    ]
    assert run.iteration_time == run.bound.time == 145


def test_a_step_by_hand_with_the_barrier():
    run = simulate(TWO, EXACT, "fifo", steps=1)
    assert spans(run, "optimizer") == []
    assert spans(run, "gpu")[2:] == [
        ("barrier", "wait", 30, 130),
        ("all", "update", 130, 135),
        ("l0", "forward", 135, 140),
        ("l1", "forward", 140, 147),
    ]
    assert run.iteration_time == 147


def test_a_layer_in_the_middle_may_wait_too():
    # l0 lands at 30 and runs until 35; l1's 50 bytes follow and land at 80.
    run = simulate(
        layered((5, 7), (20, 10), (1, 50)), EXACT, Spec("bytescheduler", {"partition": 1024, "credit": 1024})
    )
    early = simulate(layered((5, 7), (1, 1), (10, 50)), EXACT, "p3", steps=1)
    assert run.iteration_time == 61 + 5 + 7  # w1 is under way from 10 to 60, then w0
    assert spans(early, "gpu")[2:] == [("l0", "wait", 2, 61), ("l0", "forward", 61, 66), ("l1", "forward", 66, 73)]


def test_what_a_run_says_about_itself_and_saves(tmp_path):
    run = simulate(TWO, EXACT, "fifo", steps=3)
    assert run.begins == (0, 147, 294, 441)
    assert run.gap == pytest.approx(147 / 145 - 1)
    assert run.exposed == 147 - 42
    assert run.idle == pytest.approx((105 - TWO.update) / 147)  # the GPU updates while all wait for it
    assert run.throughput == pytest.approx(2 / 147e-12)  # batch 1 on 2 GPUs
    assert run.to_dict()["operations_per_step"] == 2
    run.save(tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text()) == run.to_dict()


def test_the_last_steps_begin_at_zero():
    run = simulate(TWO, EXACT, "fifo", steps=4)
    window = run.last_steps(2)
    assert next(iter(window)) == Span("gpu", "backward", "l1", 2, 0, 10)
    assert max(span.end for span in window) == 2 * 147
    assert {span.step for span in window} == {2, 3}
    assert len(run.last_steps(99)) == len(run.timeline)


@pytest.mark.parametrize("name", POLICIES)
def test_the_timeline_accounts_for_every_picosecond(name):
    """On the GPU nothing overlaps and nothing is missing; a pipe carries one chunk at a time; kinds add up."""
    rng = random.Random(name)
    for _ in range(25):
        workload, place = random_workload(rng), random_cluster(rng)
        run = simulate(workload, place, random_spec(rng, name, workload.size))
        steps = len(run.begins) - 1
        for lane in run.timeline.lanes():
            if lane != "optimizer":
                rows = sorted((span.start, span.end) for span in run.timeline if span.lane == lane)
                assert all(before[1] <= after[0] for before, after in pairwise(rows)), lane
        assert run.timeline.busy("gpu") == run.begins[-1]
        assert run.timeline.busy("gpu", "forward") == steps * workload.forward
        assert run.timeline.busy("gpu", "backward") == steps * workload.backward
        for index, (begin, end) in enumerate(pairwise(run.begins)):
            chunks = [span for span in run.timeline if span.kind == "communication" and span.step == index]
            assert all(begin <= span.start <= span.end <= end for span in chunks)
            hops = sum(span.size for span in chunks) / workload.size
            assert hops == int(hops)  # every byte crosses every hop once


@pytest.mark.parametrize(
    ("place", "schedule", "words"),
    [
        ("4x1xV100", "fifo", "does not say how fast a link is"),
        ("4@1Gbps", "fife", "schedule: 'fife' is unknown; did you mean 'fifo'"),
        ("4@1Gbps", "ddp(bucket=0B)", "schedule ddp.bucket: '0B' is out of range"),
    ],
)
def test_wrong_inputs_are_named(place, schedule, words):
    with pytest.raises(ConfigError) as caught:
        simulate(TWO, place, schedule)
    assert words in str(caught.value)
    with pytest.raises(ConfigError, match="is not a number of steps"):
        simulate(TWO, EXACT, "fifo", steps=0)
