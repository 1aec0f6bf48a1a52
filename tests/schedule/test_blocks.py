from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.schedule.arrivals import blocks

RELEASES = st.lists(st.integers(0, 10**14), max_size=60)
FACTORS = st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0])


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
def test_by_hand(releases, expected):
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


@given(st.lists(st.integers(0, 10**14), min_size=1, max_size=60))
def test_a_larger_factor_gives_no_more_blocks(releases):
    assert len(blocks(releases, 3.0)) <= len(blocks(releases, 2.0))
