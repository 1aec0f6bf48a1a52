"""Collectives whose time is known exactly."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from oracle import RATE, program, ring, star, waiting

from foretrain.collective import WHOLE
from foretrain.network.fluid import run
from foretrain.units import SECOND

LATENCY = 2e6


def halving_doubling(n: int, data: float):
    """Recursive halving, then doubling: transfer (step, rank), waiting for both partners' last step."""
    bits = n.bit_length() - 1
    steps = [(1 << k, data / 2 ** (bits - k)) for k in reversed(range(bits))]
    steps += steps[::-1]
    lists, sizes, waits = [], [], []
    for number, (distance, size) in enumerate(steps):
        for rank in range(n):
            lists.append((rank, n + (rank ^ distance)))
            sizes.append(size)
            if number:
                before = steps[number - 1][0]
                waits += [(number * n + rank, (number - 1) * n + other, WHOLE) for other in {rank, rank ^ before}]
    return waiting(program(lists, sizes, latency=[LATENCY] * len(lists)), waits)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("n", [2, 3, 8, 16, 100])
def test_ring(n: int, full: bool) -> None:
    end = run(ring(n, 1e8, LATENCY), star(n), full=full).finish.max()
    assert end == pytest.approx(2 * (n - 1) / n * 1e8 / RATE * SECOND + 2 * (n - 1) * LATENCY, rel=1e-12)


@pytest.mark.parametrize("n", [2, 8, 64])
def test_halving_doubling(n: int) -> None:
    end = run(halving_doubling(n, 1e8), star(n)).finish.max()
    steps = 2 * (n.bit_length() - 1)
    assert end == pytest.approx(2 * (n - 1) / n * 1e8 / RATE * SECOND + steps * LATENCY, rel=1e-12)


@pytest.mark.parametrize("n", [2, 5, 32])
def test_all_to_all(n: int) -> None:
    pairs = list(itertools.permutations(range(n), 2))
    whole = program([(a, n + b) for a, b in pairs], 1e8 / n, latency=[LATENCY] * len(pairs))
    end = run(whole, star(n)).finish.max()
    assert end == pytest.approx((n - 1) / n * 1e8 / RATE * SECOND + LATENCY, rel=1e-12)


@pytest.mark.parametrize("n", [2, 9, 128])
def test_incast(n: int) -> None:
    whole = program([(a, n) for a in range(1, n)], 1e7, latency=[LATENCY] * (n - 1))
    assert run(whole, star(n)).finish.max() == pytest.approx((n - 1) * 1e7 / RATE * SECOND + LATENCY, rel=1e-12)


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
