"""How busy cores are, and what that says of an operation's work."""

import pytest

from foretrain.comm.observation import Ticks, crowding, ticks


@pytest.mark.parametrize(
    ("busy", "everything", "expected"), [(0, 0, 0), (0, 100, 0), (70, 100, 0), (85, 100, 0.5), (100, 100, 1)]
)
def test_cores_that_are_mostly_busy_are_crowded(busy: int, everything: int, expected: float):
    assert crowding(Ticks(busy, everything, own=10, wall=10)) == pytest.approx(expected)


@pytest.mark.parametrize(("own", "expected"), [(0, 0), (5, 0.5), (10, 1), (40, 1)])
def test_a_computation_that_needs_no_core_is_not_delayed_whatever_others_do(own: int, expected: float):
    assert crowding(Ticks(100, 100, own, wall=10)) == pytest.approx(expected)


def test_ticks_between_readings_add_up():
    spent = Ticks(0, 0).plus(Ticks(10, 100), Ticks(40, 200)).plus(Ticks(50, 300), Ticks(60, 400))
    assert spent == Ticks(40, 200)
    assert Ticks(0, 0).plus(Ticks(0, 0, 10, 100), Ticks(0, 0, 15, 120)) == Ticks(0, 0, 5, 20)


def test_the_kernel_counts_on():
    before, after = ticks(), ticks()
    assert 0 <= before.busy <= before.all
    assert before.all <= after.all
    assert before.own < after.own
    assert before.wall < after.wall
