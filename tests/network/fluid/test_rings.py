"""Collapsed rings are the rings they stand for: alone, of unlike members, and disturbed at any moment."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import program, ring, star

from foretrain.network.fluid import Fluid, run
from foretrain.network.program import joined


def test_a_ring_alone_costs_one_event_a_member() -> None:
    network = Fluid(star(64))
    network.add(ring(64, 1e8, 1e6))
    network.advance()
    assert network.effort["events"] == 64


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12))
def test_members_that_are_not_alike(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = star(n) * rng.uniform(0.2, 1.0, 2 * n)
    one = ring(n, 1e8, 1e6)
    assert run(one, capacity).finish == pytest.approx(run(one, capacity, full=True).finish, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 10), st.floats(0.0, 1.2))
def test_whatever_comes_meets_the_ring_where_it_is(seed: int, n: int, share: float) -> None:
    """A flow on two of its links, a link that changes, in the middle of the ring: as if it had never been collapsed."""
    rng = np.random.default_rng(seed)
    capacity = star(n) * rng.uniform(0.2, 1.0, 2 * n)
    one = ring(n, 1e8, 1e6)
    when = int(share * run(one, capacity).finish.max())
    ends = []
    for full in (False, True):
        network = Fluid(capacity, full=full)
        first = network.add(one)
        second = network.add(program([(0, n), (n - 1, n + 1)], 1e7), at=when)
        network.set_capacity([1], 0.5 * capacity[1])
        network.advance()
        ends.append(np.concatenate([first.finish, second.finish]))
    assert ends[0].max() == pytest.approx(ends[1].max(), rel=1e-9)
    assert ends[0] == pytest.approx(ends[1], rel=1e-3)


def test_two_rings_that_share_links_are_not_collapsed() -> None:
    network = Fluid(star(8))
    network.add(joined([ring(8, 1e8), ring(8, 1e8)]))
    network.advance()
    both = network.now
    alone = run(ring(8, 1e8), star(8)).end
    assert alone is not None
    assert both == pytest.approx(2 * alone, rel=1e-9)


def test_rings_on_links_of_their_own_are_collapsed_together() -> None:
    network = Fluid(np.concatenate([star(8), star(8)]))
    network.add(joined([ring(8, 1e8), ring(8, 1e8, offset=16)]))
    network.advance()
    assert network.effort["events"] == 16
