"""Programs to simulate, and the certificate that their rates are max-min fair."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foretrain.network.program import Paths, Program

RATE = 50e9


def paths(lists: Sequence[Sequence[int]]) -> Paths:
    """Paths of the given links."""
    first = np.concatenate([[0], np.cumsum([len(one) for one in lists])]).astype(np.int32)
    return Paths(first, np.array([link for one in lists for link in one], np.int32))


def program(
    lists: Sequence[Sequence[int]], sizes: Sequence[float] | float = 1e9, **columns: Sequence[float]
) -> Program:
    """Independent flows over the given links; ``after`` may be a list of (waiter, waited for, lag)."""
    types = {"steps": np.int32, "priority": np.int32}
    arrays = {name: np.array(values, types.get(name, np.float64)) for name, values in columns.items()}
    return Program.of(paths(lists), np.broadcast_to(np.asarray(sizes, float), len(lists)).copy(), **arrays)


def waiting(base: Program, waits: Sequence[tuple[int, int, int]]) -> Program:
    """``base`` with dependencies (waiter, waited for, lag)."""
    ordered = sorted(waits)
    first = np.searchsorted([flow for flow, *_ in ordered], np.arange(len(base) + 1)).astype(np.int32)
    after, lag = (np.array([wait[k] for wait in ordered], np.int32) for k in (1, 2))
    columns = {name: getattr(base, name) for name in ("steps", "latency", "release", "weight", "priority")}
    return Program.of(base.paths, base.size, first=first, after=after, lag=lag, **columns)


def ring(n: int, data: float, latency: float = 0.0, offset: int = 0) -> Program:
    """A ring all-reduce of ``n`` hosts at a switch: host i sends over link ``offset`` + i, receives over that + n."""
    lists = [(offset + i, offset + n + (i + 1) % n) for i in range(n)]
    base = program(lists, data / n, steps=[2 * (n - 1)] * n, latency=[latency] * n)
    return waiting(base, [(i, (i - 1) % n, 0) for i in range(n)])


def star(n: int, rate: float = RATE) -> np.ndarray:
    """Capacities of ``n`` hosts at a switch: links 0 to n − 1 up, n to 2n − 1 down."""
    return np.full(2 * n, rate)


def check_certificate(
    capacity: np.ndarray, lists: Sequence[Sequence[int]], rates: np.ndarray, weights: np.ndarray, classes: np.ndarray
) -> None:
    """Feasible, and every flow has a saturated link on which no flow of its class, and none below, is better off."""
    load = np.zeros(len(capacity))
    for links, rate in zip(lists, rates, strict=True):
        load[list(links)] += rate
    assert (load <= capacity * (1 + 1e-9)).all()
    for flow, links in enumerate(lists):
        level = rates[flow] / weights[flow]
        for link in links:
            others = [g for g, path in enumerate(lists) if link in path]
            same = [g for g in others if classes[g] == classes[flow]]
            lower = [g for g in others if classes[g] > classes[flow]]
            saturated = load[link] >= capacity[link] * (1 - 1e-9)
            highest = all(level >= rates[g] / weights[g] * (1 - 1e-9) for g in same)
            if saturated and highest and all(rates[g] <= 1e-9 * capacity[link] for g in lower):
                break
        else:
            raise AssertionError(f"flow {flow} has no bottleneck: {links}, {rates}")


def fat_tree_paths(rng: np.random.Generator, hosts: int, flows: int) -> tuple[list[tuple[int, ...]], int]:
    """Random flows over a leaf-spine of 4 hosts a leaf and 2 spines; links: host up, host down, leaf up, leaf down."""
    leaves, spines = hosts // 4, 2
    up, down = 2 * hosts, 2 * hosts + leaves * spines
    lists = []
    for _ in range(flows):
        a, b = (int(x) for x in rng.choice(hosts, 2, replace=False))
        spine = int(rng.integers(spines))
        inner = () if a // 4 == b // 4 else (up + a // 4 * spines + spine, down + b // 4 * spines + spine)
        lists.append((a, *inner, hosts + b))
    return lists, 2 * hosts + 2 * leaves * spines
