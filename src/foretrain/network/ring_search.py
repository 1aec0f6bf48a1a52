"""Orders of ranks for rings that use all there is: every NVLink of a mesh, every NIC of a server."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foretrain.network.topology.graph import Topology

MOST_CHANNELS = 8
"""Rings at once: as many as the most NICs that servers have."""


def ring_orders(topology: Topology, ranks: NDArray[np.int64], local: int) -> NDArray[np.int64]:
    """Orders of the job's ranks (by their number in the job), int64 (channels, ranks).

    In one server whose GPUs are linked to each other, edge-disjoint Hamiltonian cycles over these links, found
    greedily. Over servers of ``local`` ranks with several NICs, one channel per NIC: channel c goes through server s
    from rank c − s on, so that what leaves a server on a rail enters the next one on the same. Else the order given.
    """
    count = len(ranks)
    plain = np.arange(count)[None]
    if local < 3:
        return plain
    inside = _cycles(_links(topology, ranks[:local]))
    cycles = inside if len(inside) else [list(range(local))]
    if local == count:
        return np.array(cycles)
    nics = _nics(topology, ranks)
    if nics < 2:
        return np.concatenate([np.arange(0, count, local)[:, None] + np.array(cycles[0])], axis=0).reshape(1, -1)
    channels = min(nics, local, MOST_CHANNELS)
    servers = np.arange(count // local)
    orders = []
    for channel in range(channels):
        cycle = np.array(cycles[channel % len(cycles)])
        starts = (channel * (local // channels) - servers) % local
        within = cycle[(starts[:, None] + np.arange(local)) % local]
        orders.append((servers[:, None] * local + within).reshape(-1))
    return np.array(orders)


def _links(topology: Topology, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many of the slowest direct links' rate there are between each two ranks; all 0 without any."""
    nodes = topology.ranks[ranks]
    number = np.full(len(topology.nodes), -1)
    number[nodes] = np.arange(len(nodes))
    source, target = number[topology.source], number[topology.target]
    direct = (source >= 0) & (target >= 0)
    rate = np.zeros((len(nodes), len(nodes)))
    np.add.at(rate, (source[direct], target[direct]), topology.capacity[direct])
    least = rate[rate > 0].min(initial=np.inf)
    return (rate / least + 1e-9).astype(np.int64)


def _cycles(links: NDArray[np.int64]) -> list[list[int]]:
    """Directed Hamiltonian cycles, no link used more often than there are of it."""
    left, found = links.copy(), []
    while len(found) < MOST_CHANNELS and (cycle := _cycle(left)):
        for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True):
            left[a, b] -= 1
        found.append(cycle)
    return found


def _cycle(links: NDArray[np.int64]) -> list[int]:
    """One Hamiltonian cycle from 0 on, over links of which most are left first; empty if there is none."""
    count = len(links)
    if count > 16:  # No mesh is that large, and the search is exponential.
        return []
    path, seen = [0], {0}

    def extend() -> bool:
        if len(path) == count:
            return bool(links[path[-1], 0] > 0)
        here = path[-1]
        for near in np.argsort(-links[here], kind="stable").tolist():
            if links[here, near] > 0 and near not in seen:
                path.append(near)
                seen.add(near)
                if extend():
                    return True
                seen.remove(path.pop())
        return False

    return path if extend() else []


def _nics(topology: Topology, ranks: NDArray[np.int64]) -> int:
    """NICs of the job's first server."""
    server = topology.nodes[topology.ranks[ranks[0]]].server
    return sum(node.kind == "nic" and node.server == server for node in topology.nodes) if server >= 0 else 0
