"""A memory of parts: what is given is taken again, and nothing is taken twice."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foretrain.network.packet.memory_layout import Extents, Parts


def test_parts_begin_where_lines_do():
    parts = Parts(80)
    first, second = parts.add(np.arange(3)), parts.add(np.ones((2, 8), np.int64))
    assert (first, second, parts.end) == (80, 88, 104)
    np.testing.assert_array_equal(parts.whole(), [0, 1, 2, 0, 0, 0, 0, 0, *[1] * 16])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_what_is_given_is_taken_again(sizes, random):
    free, held = Extents(), {}
    free.give(100, sum(sizes))
    for size in sizes:
        held[free.take(size)] = size
    assert free.take(1) is None
    taken = sorted((first, size) for first, size in held.items())
    assert taken[0][0] == 100
    assert all(first + size == then for (first, size), (then, _) in pairwise(taken))
    random.shuffle(taken)
    for first, size in taken:
        free.give(first, size)
    assert free.take(sum(sizes)) == 100
