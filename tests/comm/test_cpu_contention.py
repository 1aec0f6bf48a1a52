"""How busy cores are, and what that says of an operation's work."""

import pytest

from foretrain.comm.observation import Ticks, crowding, ticks


@pytest.mark.parametrize(
    ("busy", "everything", "expected"), [(0, 0, 0), (0, 100, 0), (70, 100, 0), (85, 100, 0.5), (100, 100, 1)]
)
def test_cores_that_are_mostly_busy_are_crowded(busy: int, everything: int, expected: float):
    assert crowding(Ticks(busy, everything)) == pytest.approx(expected)


def test_ticks_between_readings_add_up():
    spent = Ticks(0, 0).plus(Ticks(10, 100), Ticks(40, 200)).plus(Ticks(50, 300), Ticks(60, 400))
    assert spent == Ticks(40, 200)


def test_the_kernel_counts_on():
    before, after = ticks(), ticks()
    assert 0 <= before.busy <= before.all
    assert before.all <= after.all
