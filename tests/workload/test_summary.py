"""The arithmetic of recording, on logs written by hand: no torch, no clock."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.workload.step_log import Anatomy, HookEvent, observe
from foretrain.workload.summary import share, summarize

TWO = Anatomy(
    modules=("Net", "a", "b"), parents=(0, 0, 0), parameters=("a.w", "b.w"), owners=((1,), (2,)), frozen=frozenset()
)


def observed(text, scale=1):
    """What is observed of events such as ``call 1@12``: of module 1, at 12 times ``scale``."""
    events = re.findall(r"(\w+) ?(\d*)@(\d+)", text)
    return observe([HookEvent(kind, int(index or 0), int(time) * scale) for kind, index, time in events])


def step(scale=1):
    return observed(
        "begin@0, call 0@10, call 1@12, call 2@20, backward@30, release 1@40, release 0@55, returned@60, update@70, "
        "updated@80",
        scale,
    )


def summary(*steps, sizes=None, anatomy=TWO):
    return summarize(steps, anatomy, sizes or {0: 300, 1: 100}, name="net", batch=1, unit="rows", source="by hand")


def columns(workload):
    return [(layer.name, layer.forward, layer.backward, layer.update) for layer in workload.layers]


def test_one_step_by_hand_and_the_median_of_three_which_is_the_middle_one():
    workload = summary(step())
    assert columns(workload) == [("a", 10, 20, 7), ("b", 10, 10, 3)]
    assert [(g.name, g.layer, g.release) for g in workload.gradients] == [("a.w", 0, 25), ("b.w", 1, 10)]
    assert columns(summary(step(1), step(100), step(2))) == columns(summary(step(2)))


def test_sums_are_those_of_whole_passes():
    workload = summary(step(1), step(3), step(10), step(11))
    assert (workload.forward, workload.backward, workload.update) == (130, 195, 65)


def test_evaluation_pauses_the_layer_that_runs():
    found = observed("begin@0, call 1@0, pause@5, resume@105, call 2@110, backward@111, release 0@120, returned@130")
    assert found.segments == ((1, 5), (1, 5), (2, 1))
    assert (found.backward, found.releases, found.update, found.rounds) == (19, {0: 9}, None, 1)


def test_backward_inside_backward_and_calls_inside_it_are_one_pass():
    found = observed(
        "begin@0, call 1@0, backward@10, call 1@12, backward@14, release 0@15, returned@16, release 0@18, returned@20"
    )
    assert found.segments == ((1, 10),)
    assert (found.backward, found.releases, found.rounds) == (10, {0: 8}, 1)


def test_a_layer_missing_in_some_steps_keeps_its_place():
    without_a = observed("begin@0, call 2@20, backward@30, release 1@40, returned@60, call 1@61")
    with pytest.warns(UserWarning, match=r"some of the 3 steps.*a\.w"):
        workload = summary(without_a, step(), step())
    assert [layer.name for layer in workload.layers] == ["a", "b"]


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
