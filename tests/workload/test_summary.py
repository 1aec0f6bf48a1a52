"""The arithmetic of recording, on logs written by hand: no torch, no clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import RecordError
from foretrain.workload.step_log import Anatomy, HookEvent, observe
from foretrain.workload.summary import share, summarize

TWO = Anatomy(
    modules=("Net", "a", "b"), parents=(0, 0, 0), parameters=("a.w", "b.w"), owners=((1,), (2,)), frozen=frozenset()
)


def log(*entries):
    return [HookEvent(*(entry if len(entry) == 3 else (entry[0], 0, entry[1]))) for entry in entries]


def step(scale=1):
    """The model at 10, a at 12, b at 20, backward from 30 to 60, update from 70 to 80."""
    return observe(
        log(
            ("begin", 0),
            ("call", 0, 10 * scale),
            ("call", 1, 12 * scale),
            ("call", 2, 20 * scale),
            ("backward", 30 * scale),
            ("release", 1, 40 * scale),
            ("release", 0, 55 * scale),
            ("returned", 60 * scale),
            ("update", 70 * scale),
            ("updated", 80 * scale),
        )
    )


def summary(*steps, sizes=None, anatomy=TWO):
    return summarize(steps, anatomy, sizes or {0: 300, 1: 100}, name="net", batch=1, unit="rows", source="by hand")


def columns(workload):
    return [(layer.name, layer.forward, layer.backward, layer.update) for layer in workload.layers]


def test_one_step_by_hand():
    workload = summary(step())
    assert columns(workload) == [("a", 10, 20, 7), ("b", 10, 10, 3)]
    assert [(g.name, g.layer, g.release) for g in workload.gradients] == [("a.w", 0, 25), ("b.w", 1, 10)]


def test_the_median_of_three_steps_is_the_middle_one():
    assert columns(summary(step(1), step(100), step(2))) == columns(summary(step(2)))


def test_sums_are_those_of_whole_passes():
    workload = summary(step(1), step(3), step(10), step(11))
    assert (workload.forward, workload.backward, workload.update) == (130, 195, 65)


def test_evaluation_pauses_the_layer_that_runs():
    observed = observe(
        log(
            ("begin", 0),
            ("call", 1, 0),
            ("pause", 5),
            ("resume", 105),
            ("call", 2, 110),
            ("backward", 111),
            ("release", 0, 120),
            ("returned", 130),
        )
    )
    assert observed.segments == ((1, 5), (1, 5), (2, 1))
    assert (observed.backward, observed.releases, observed.update, observed.rounds) == (19, {0: 9}, None, 1)


def test_backward_inside_backward_and_calls_inside_it_are_one_pass():
    observed = observe(
        log(
            ("begin", 0),
            ("call", 1, 0),
            ("backward", 10),
            ("call", 1, 12),
            ("backward", 14),
            ("release", 0, 15),
            ("returned", 16),
            ("release", 0, 18),
            ("returned", 20),
        )
    )
    assert observed.segments == ((1, 10),)
    assert (observed.backward, observed.releases, observed.rounds) == (10, {0: 8}, 1)


def test_a_layer_missing_in_some_steps_keeps_its_place():
    without_a = observe(
        log(("begin", 0), ("call", 2, 20), ("backward", 30), ("release", 1, 40), ("returned", 60), ("call", 1, 61))
    )
    with pytest.warns(UserWarning, match=r"some of the 3 steps.*a\.w"):
        workload = summary(without_a, step(), step())
    assert [layer.name for layer in workload.layers] == ["a", "b"]


def test_a_gradient_that_was_never_dense():
    with pytest.raises(RecordError, match=r"a\.w: the gradient is sparse"):
        summary(step(), sizes={0: 0, 1: 100})


@given(st.integers(0, 10**15), st.lists(st.integers(0, 10**12), min_size=1, max_size=40))
def test_shares_add_up_and_are_fair(total, weights):
    parts = share(total, weights)
    assert sum(parts) == total
    assert all(part >= 0 for part in parts)
    if any(weights):
        whole = sum(weights)
        assert all(
            abs(part - total * weight / whole) <= 1 + 1e-9 * total for part, weight in zip(parts, weights, strict=True)
        )
