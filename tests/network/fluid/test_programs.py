"""Random programs: bytes conserved, no link over capacity, causality; local refill = full; compiled = interpreted."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.collective import WHOLE
from foretrain.network.fluid import Fluid, run
from foretrain.network.program import Program, joined
from foretrain.units import SECOND
from tests.network.fluid import oracle
from tests.network.fluid.oracle import RATE, program, ring, star, waiting


def random_program(seed: int, flows: int = 40) -> tuple[Program, np.ndarray, list[tuple[int, ...]]]:
    """A random DAG over an oversubscribed leaf-spine, with steps, latencies, releases and all three kinds of lag."""
    rng = np.random.default_rng(seed)
    lists, links = oracle.fat_tree_paths(rng, 12, int(rng.integers(2, flows)))
    n = len(lists)
    capacity = oracle.RATE * rng.uniform(0.25, 1.5, links)
    base = program(
        lists,
        rng.choice([0.0, 1e5, 1e6, 3e6], n),
        steps=rng.integers(1, 5, n),
        latency=rng.choice([0.0, 1e6, 5e6], n),
        release=rng.choice([0.0, 2e7], n),
        weight=rng.choice([1.0, 2.0], n),
    )
    waits = []
    for flow in range(1, n):
        others = {int(x) for x in rng.integers(0, flow, rng.integers(0, 3))}
        waits += [(flow, other, int(rng.choice([0, 1, 2, WHOLE]))) for other in others]
    return waiting(base, waits), capacity, lists


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_bytes_are_conserved_and_no_link_is_over_capacity(seed: int) -> None:
    whole, capacity, lists = random_program(seed)
    network = Fluid(capacity, bins=64)
    handle = network.add(whole)
    network.advance()
    carried, width = network.utilisation()
    expected = np.zeros(len(capacity))
    for flow, links in enumerate(lists):
        expected[list(links)] += whole.size[flow] * whole.steps[flow]
    assert carried.sum(axis=1) == pytest.approx(expected, rel=1e-9, abs=1e-3)
    assert (carried <= capacity[:, None] * width / 1e12 * (1 + 1e-9) + 1e-6).all()
    assert handle.end is not None


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_nothing_ends_before_what_it_waits_for_or_faster_than_light(seed: int) -> None:
    whole, capacity, lists = random_program(seed)
    finish = run(whole, capacity).finish
    for flow, links in enumerate(lists):
        alone = whole.steps[flow] * (whole.latency[flow] + whole.size[flow] / capacity[list(links)].min() * 1e12)
        assert finish[flow] >= (whole.release[flow] + alone) * (1 - 1e-12)
        for d in range(whole.first[flow], whole.first[flow + 1]):
            if whole.lag[d] == WHOLE:
                assert finish[flow] >= (finish[whole.after[d]] + alone) * (1 - 1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_the_local_refill_ends_when_the_full_one_does(seed: int) -> None:
    whole, capacity, _ = random_program(seed)
    assert run(whole, capacity).finish.max() == pytest.approx(run(whole, capacity, full=True).finish.max(), rel=1e-9)


def random_case(seed: int) -> tuple[np.random.Generator, np.ndarray, list[tuple[int, ...]], np.ndarray]:
    rng = np.random.default_rng(seed)
    lists, links = oracle.fat_tree_paths(rng, 16, int(rng.integers(5, 50)))
    capacity = oracle.RATE * rng.uniform(0.25, 1.5, links)
    weights = np.ones(len(lists)) if seed % 2 else rng.uniform(0.5, 4.0, len(lists))
    return rng, capacity, lists, weights


@pytest.mark.parametrize("full", [False, True])
@given(st.integers(0, 10**6))
def test_rates_are_max_min_fair_while_flows_come_and_go(full: bool, seed: int) -> None:
    """Half of the flows come at once, the others one by one; some leave."""
    rng, capacity, lists, weights = random_case(seed)
    network, half = Fluid(capacity, full=full), len(lists) // 2
    handles = {tuple(range(half)): network.add(oracle.program(lists[:half], 1e15, weight=weights[:half]))}
    for flow in range(half, len(lists)):
        handles[flow,] = network.add(oracle.program([lists[flow]], 1e15, weight=[weights[flow]]))
        network.advance(network.now + 1)
        if rng.random() < 0.3 and len(handles) > 2:
            network.cancel(handles.pop(list(handles)[int(rng.integers(1, len(handles)))]))
    flows = [flow for group in handles for flow in group]
    rates = np.concatenate([network.rates(handle) for handle in handles.values()])
    oracle.check_certificate(capacity, [lists[f] for f in flows], rates, weights[flows], np.zeros(len(flows)))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3))
def test_every_instant_has_its_certificate(seed: int, classes: int) -> None:
    rng, capacity, lists, weights = random_case(seed)
    priority = rng.integers(0, classes, len(lists))
    sizes = rng.uniform(1e6, 1e8, len(lists))
    release = rng.choice([0.0, 1e8, 5e8], len(lists))
    network = Fluid(capacity, classes=classes)
    handle = network.add(oracle.program(lists, sizes, weight=weights, priority=priority, release=release), at=0)
    while handle.end is None:
        network.advance(int(np.ceil(network.next_event())))
        active = np.flatnonzero((network.progress(handle) < 1) & (release <= network.now))
        if handle.end is None and len(active):
            oracle.check_certificate(
                capacity, [lists[f] for f in active], network.rates(handle)[active], weights[active], priority[active]
            )


LATENCY = 2e6


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("n", [2, 3, 8, 16, 100])
def test_ring(n: int, full: bool) -> None:
    end = run(ring(n, 1e8, LATENCY), star(n), full=full).finish.max()
    assert end == pytest.approx(2 * (n - 1) / n * 1e8 / RATE * SECOND + 2 * (n - 1) * LATENCY, rel=1e-12)


@pytest.mark.parametrize("n", [2, 5, 32])
def test_all_to_all(n: int) -> None:
    pairs = list(itertools.permutations(range(n), 2))
    whole = program([(a, n + b) for a, b in pairs], 1e8 / n, latency=[LATENCY] * len(pairs))
    end = run(whole, star(n)).finish.max()
    assert end == pytest.approx((n - 1) / n * 1e8 / RATE * SECOND + LATENCY, rel=1e-12)


def test_a_pipeline_of_chunks() -> None:
    """A chain of 5 hops passes on 10 chunks, one behind the other: 10 + 4 chunk times."""
    chunks, hops = 10, 5
    base = program([(h,) for h in range(hops)], 1e6, steps=[chunks] * hops, latency=[LATENCY] * hops)
    whole = waiting(base, [(h, h - 1, 1) for h in range(1, hops)])
    end = run(whole, np.full(hops, RATE)).finish.max()
    assert end == pytest.approx((chunks + hops - 1) * (1e6 / RATE * SECOND + LATENCY), rel=1e-12)


def test_flows_that_end_at_different_times_share_what_is_left() -> None:
    """1, 2 and 3 units on one link of rate 1 a second: 3, 5 and 6 seconds."""
    handle = run(program([(0,)] * 3, [1e9, 2e9, 3e9]), np.array([1e9]))
    assert handle.finish.tolist() == pytest.approx([3 * SECOND, 5 * SECOND, 6 * SECOND], rel=1e-15)
    assert handle.end == 6 * SECOND


def test_nothing_to_send_costs_its_latency() -> None:
    handle = run(program([(0,), ()], [0.0, 5.0], latency=[3.0, 7.0]), np.array([1e9]))
    assert handle.finish.tolist() == [3.0, 7.0]


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
