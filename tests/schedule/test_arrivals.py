"""Arrival times of gradients: the profile of the last steps and the blocks it shows."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.schedule.monitor import Arrivals, blocks

RELEASES = st.lists(st.integers(0, 10**14), max_size=60)
FACTORS = st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0])


def observed(*steps, keep=None):
    """Steps of arrival times, each step beginning at another time."""
    arrivals, now = Arrivals(len(steps[0]), keep or len(steps)), 0
    for step in steps:
        arrivals.begin(now)
        for task, time in enumerate(step):
            if time is not None:
                arrivals.note(task, now + time)
        now += 12_345
    arrivals.begin(now)
    return arrivals


def test_a_step_in_which_a_gradient_is_missing_does_not_count():
    arrivals = observed((1, 2), (1, None), (3, 4), keep=2)
    assert arrivals.complete
    assert arrivals.medians() == [2, 3]


def test_the_step_under_way_does_not_count():
    arrivals = observed((1, 2))
    arrivals.note(0, 10**9)
    assert arrivals.medians() == [1, 2]


def test_medians_are_of_the_last_steps_and_since_the_step_began():
    assert observed((10, 20), (12, 90), (11, 30)).medians() == [11, 30]
    assert observed((99, 99), (10, 20), (12, 90), (11, 30), keep=3).medians() == [11, 30]


@pytest.mark.parametrize(("tolerance", "off"), [(0.19, True), (0.2, False), (0.21, False)])
def test_off_takes_all_arrivals_together(tolerance, off):
    # Moved by 20 + 20 of 100 + 100.
    assert observed((120, 80)).off([100, 100], tolerance) is off


def test_blocks_are_those_of_the_median_step():
    steps = [(0, 1, 2, 100, 101, 102), (5, 6, 7, 110, 111, 112), (900, 901, 902, 903, 904, 905)]
    found = observed(*steps).blocks(2.0, 0.0)
    expected = blocks(observed(*steps).medians(), 2.0)
    assert expected == ((0, 1, 2), (3, 4, 5))
    assert found.of == (0, 0, 0, 1, 1, 1)
    assert found.sizes == (3, 3)


def test_intervals_and_durations_are_low_quantiles_over_the_steps():
    # Last of the first block to first of the second: 98, 92, 95. First to last: 2, 8, 5.
    steps = [(0, 1, 2, 100, 101, 102), (0, 1, 8, 100, 101, 108), (0, 1, 5, 100, 101, 105)]
    lowest, median, highest = (observed(*steps).blocks(2.0, share) for share in (0.0, 0.5, 1.0))
    assert [b.intervals for b in (lowest, median, highest)] == [(92,), (95,), (98,)]
    assert [b.durations for b in (lowest, median, highest)] == [(2, 2), (5, 5), (8, 8)]


def test_an_interval_is_never_negative():
    # In the second step the first block's last gradient comes after the second block's first.
    steps = [(0, 1, 2, 100, 101, 102), (0, 1, 150, 100, 101, 102), (0, 1, 2, 100, 101, 102)]
    assert observed(*steps).blocks(2.0, 0.0).intervals == (0,)


@pytest.mark.parametrize(
    ("releases", "expected"),
    [
        ((), ()),
        ((5,), ((0,),)),
        ((7, 7, 7), ((0, 1, 2),)),
        ((0, 10, 20, 30), ((0, 1, 2, 3),)),  # equal gaps: none is twice the mean
        ((0, 1, 2, 100, 101, 102), ((0, 1, 2), (3, 4, 5))),
        ((102, 101, 100, 2, 1, 0), ((5, 4, 3), (2, 1, 0))),
        ((0, 1, 2, 3, 12), ((0, 1, 2, 3), (4,))),  # mean 3, gap 9
        ((0, 1, 2, 6), ((0, 1, 2, 3),)),  # mean 2, gap 4: not more than twice
        ((0, 1, 2, 7), ((0, 1, 2), (3,))),
    ],
)
def test_blocks_of_small_examples(releases, expected):
    assert blocks(releases) == expected


@given(RELEASES, FACTORS)
def test_every_index_is_in_one_block_and_in_release_order(releases, factor):
    flat = [index for block in blocks(releases, factor) for index in block]
    assert sorted(flat) == list(range(len(releases)))
    assert [releases[index] for index in flat] == sorted(releases)
    assert all(blocks(releases, factor))


@given(RELEASES, FACTORS, st.integers(1, 10**6), st.integers(0, 10**12))
def test_scaling_and_shifting_change_nothing(releases, factor, scale, shift):
    assert blocks([release * scale + shift for release in releases], factor) == blocks(releases, factor)


@given(RELEASES.filter(bool), FACTORS)
def test_gaps_between_blocks_are_the_long_ones(releases, factor):
    found = blocks(releases, factor)
    mean = (max(releases) - min(releases)) / max(1, len(releases) - 1)
    for before, after in pairwise(found):
        assert releases[after[0]] - releases[before[-1]] >= factor * mean * (1 - 1e-12)
    for block in found:
        for one, other in pairwise(block):
            assert releases[other] - releases[one] <= factor * mean * (1 + 1e-12)
