"""Robust iteration times."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.planner.knob_space import robust

TIMES = st.lists(st.floats(0.1, 10), min_size=1, max_size=40)


@given(TIMES)
def test_it_is_among_what_was_measured_whatever_the_order(times):
    sample = robust(times)
    assert min(times) <= sample.time <= max(times)
    assert sample == robust(sorted(times))
    assert sample.error >= 0
    assert sample.iterations == len(times)


@given(TIMES, st.floats(0.5, 4))
def test_another_unit_changes_nothing_else(times, factor):
    sample, scaled = robust(times), robust([factor * time for time in times])
    assert scaled.time == pytest.approx(factor * sample.time)
    assert scaled.error == pytest.approx(factor * sample.error, abs=1e-9)


def test_outliers_do_not_count():
    times = [1.00, 1.01, 0.99, 1.00, 1.02, 0.98, 9.0, 30.0]
    assert robust(times).time == pytest.approx(1.0, abs=0.011)
    assert robust(times).error < 0.02


def test_the_error_is_that_of_a_median():
    source = random.Random(0)
    found = [robust([source.gauss(1, 0.03) for _ in range(101)]) for _ in range(300)]
    off = math.sqrt(sum((sample.time - 1) ** 2 for sample in found) / len(found))
    assert sum(sample.error for sample in found) / len(found) == pytest.approx(off, rel=0.15)
