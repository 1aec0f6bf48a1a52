"""What stands for contributions that are lost, in every type of floats, over sockets that lose packets."""

import numpy as np
import pytest

from foretrain.comm.bounded import Hint
from foretrain.comm.buffers import narrow, widen
from tests.comm.bounded.group import group
from tests.comm.bounded.relay import Network, losing_data
from tests.comm.collectives.test_ring import nothing_is_left_behind

__all__ = ["nothing_is_left_behind"]

RANKS, COUNT = 3, 300_000
FLOATS = pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float64"])


def ones(kind):
    if kind != "bfloat16":
        return np.ones(COUNT, kind)
    made = np.empty(COUNT, np.uint16)
    narrow(np.ones(COUNT, np.float32), made)
    return made


def step(members, kind, tolerance):
    """Sum of ones of all ranks, and how many contributions each value misses."""
    arrays, brief = [ones(kind) for _ in members], kind == "bfloat16"
    hint = Hint(tolerance=tolerance)
    works = [one.all_reduce(each, bfloat16=brief, hint=hint) for one, each in zip(members, arrays, strict=True)]
    assert all(work.wait(300) for work in works)
    missing = np.zeros(COUNT)
    for loss in (loss for work in works for loss in work.losses):
        item = arrays[0].itemsize
        missing[loss.place // item : (loss.place + loss.size) // item] += 1
    for each in arrays[1:]:
        np.testing.assert_array_equal(each.view(np.uint8), arrays[0].view(np.uint8))
    return widen(arrays[0]) if brief else arrays[0].astype(float), missing


@FLOATS
def test_a_lost_gradient_counts_as_zero(kind):
    with Network(losing_data(0.2)) as network, group(RANKS, network=network) as members:
        found, missing = step(members, kind, 0.4)
    assert {0, 1} <= set(missing) <= {0, 1, 2}  # a rank's own contribution to its block is there
    np.testing.assert_array_equal(found, RANKS - missing)


@FLOATS
def test_what_came_is_divided_by_how_much_came(kind):
    """3/2 of two ones are exact, and 3/1 of one, in every type."""
    with Network(losing_data(0.2)) as network, group(RANKS, rescale=True, network=network) as members:
        found, missing = step(members, kind, 0.4)
    assert missing.any()
    np.testing.assert_array_equal(found, RANKS)


@FLOATS
def test_feedback_adds_what_was_lost_in_the_next_step(kind):
    with Network(losing_data(0.2)) as network, group(RANKS, feedback=True, network=network) as members:
        first, missing = step(members, kind, 0.4)
        second, nothing = step(members, kind, 0.0)
        third, _ = step(members, kind, 0.0)
    assert missing.any()
    assert not nothing.any()
    np.testing.assert_array_equal(first, RANKS - missing)
    np.testing.assert_array_equal(second, RANKS + missing)
    np.testing.assert_array_equal(third, RANKS)
