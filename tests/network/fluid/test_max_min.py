"""Rates against linear programs and the certificate, also while flows come and go."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.network.fluid import Fluid


def random_case(seed: int) -> tuple[np.random.Generator, np.ndarray, list[tuple[int, ...]], np.ndarray]:
    rng = np.random.default_rng(seed)
    lists, links = oracle.fat_tree_paths(rng, 16, int(rng.integers(5, 50)))
    capacity = oracle.RATE * rng.uniform(0.25, 1.5, links)
    weights = np.ones(len(lists)) if seed % 2 else rng.uniform(0.5, 4.0, len(lists))
    return rng, capacity, lists, weights


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("block", range(10))
def test_rates_are_those_of_a_linear_program_while_flows_come_and_go(block: int, full: bool) -> None:
    """Twenty random oversubscribed cases a block: half the flows come at once, the others one by one, some leave."""
    for seed in range(20 * block, 20 * block + 20):
        rng, capacity, lists, weights = random_case(seed)
        network = Fluid(capacity, full=full)
        half = len(lists) // 2
        handles = {
            tuple(range(half)): network.add(oracle.program(lists[:half], 1e15, weight=weights[:half])),
        }
        for flow in range(half, len(lists)):
            handles[flow,] = network.add(oracle.program([lists[flow]], 1e15, weight=[weights[flow]]))
            network.advance(network.now + 1)
            if rng.random() < 0.3 and len(handles) > 2:
                leaving = list(handles)[int(rng.integers(1, len(handles)))]
                network.cancel(handles.pop(leaving))
        flows = [flow for group in handles for flow in group]
        rates = np.concatenate([network.rates(handle) for handle in handles.values()])
        expected = oracle.max_min(capacity, [lists[f] for f in flows], weights[flows])
        assert np.abs(rates / expected - 1).max() < 1e-12


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
        oracle.step(network)
        active = np.flatnonzero((network.progress(handle) < 1) & (release <= network.now))
        if handle.end is None and len(active):
            oracle.check_certificate(
                capacity,
                [lists[f] for f in active],
                network.rates(handle)[active],
                weights[active],
                priority[active],
            )


def test_a_lower_class_gets_what_is_left() -> None:
    network = Fluid(oracle.star(3, 100.0), classes=2)
    handle = network.add(oracle.program([(0, 4), (0, 5), (1, 5)], 1000.0, priority=[0, 1, 1]))
    network.advance(0)
    assert network.rates(handle).tolist() == pytest.approx([100.0, 0.0, 100.0])
    network.advance()
    assert handle.finish.tolist() == pytest.approx([10e12, 20e12, 10e12])


def test_weights_divide_a_bottleneck() -> None:
    network = Fluid(oracle.star(3, 90.0))
    handle = network.add(oracle.program([(0, 4), (0, 5)], 1e6, weight=[1.0, 2.0]))
    network.advance(0)
    assert network.rates(handle).tolist() == [30.0, 60.0]


def test_a_fast_flow_yields_even_at_its_own_bottleneck() -> None:
    """The rule that is easy to miss: g is alone and fast on link 0; when f comes, both get half."""
    network = Fluid(np.array([100.0, 30.0]))
    first = network.add(oracle.program([(0,)], 1e6))
    network.advance(0)
    second = network.add(oracle.program([(0, 1)], 1e6))
    third = network.add(oracle.program([(0,)], 1e6))
    network.advance(1)
    rates = [network.rates(one)[0] for one in (first, second, third)]
    assert rates == pytest.approx([35.0, 30.0, 35.0])
