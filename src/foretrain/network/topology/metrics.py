"""Metrics of a topology: distances, bisection, oversubscription, and whether it is a BiGraph."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretrain.network.topology.graph import Topology

_EXACT, _SAMPLE = 512, 32
"""Ranks up to which every one is a source of `diameter`; how many of more than that."""
_LARGEST = 40_000
"""Links of the contracted network up to which `bisection` computes a flow: some seconds."""
_FAR = np.iinfo(np.int64).max // 4


def diameter(topology: Topology) -> int:
    """Return the most links between two ranks on the way of the smallest metric over what is up.

    Of more than 512 ranks only 32 are looked from, evenly spread: exact where ranks are alike, as in every fabric here.
    """
    ranks = topology.ranks
    if len(ranks) > _EXACT:
        ranks = ranks[np.linspace(0, len(ranks) - 1, _SAMPLE).astype(int)]
    return max(int(_hops(topology, part).max()) for part in np.array_split(ranks, -(-len(ranks) // 64)))


def _hops(topology: Topology, sources: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the links from each source to each rank, int64 (ranks, sources): Bellman-Ford from all sources at once."""
    # The number of links stands in the low bits, so that the smallest sum is the nearest of the cheapest ways.
    weight = (topology.metric.astype(np.int64) << 20) + 1
    order = np.flatnonzero(topology.up)
    order = order[np.argsort(topology.target[order], kind="stable")]
    passes = np.array([node.forwards for node in topology.nodes])
    reached = np.full((len(topology.nodes), len(sources)), _FAR)
    reached[sources, np.arange(len(sources))] = 0
    links = order
    while True:
        targets, starts = np.unique(topology.target[links], return_index=True)
        through = reached[topology.source[links]] + weight[links, None]
        nearer = np.minimum(reached[targets], np.minimum.reduceat(through, starts, axis=0))
        if np.array_equal(nearer, reached[targets]):
            return reached[topology.ranks] & ((1 << 20) - 1)
        reached[targets] = nearer
        # Only the sources themselves send over what leaves a node that does not forward.
        links = order[passes[topology.source[order]]]


def bisection(topology: Topology) -> float | None:
    """Return the most bytes/s from the first half of the ranks to the second, a minimum cut; None where it would take
    long.

    Switches of one bundle count as one: exact where they are alike. It is the cut between these two halves; another way
    to halve may cut less, as it does in a BiGraph. A rank in the middle of an odd number counts to the first half.
    """
    import networkx as nx

    flows = _contracted(topology)
    if not 0 < len(flows) <= _LARGEST:
        return None
    graph = nx.DiGraph()
    for (a, b), rate in flows.items():
        graph.add_edge(a, b, capacity=rate)
    if not (graph.has_node("from") and graph.has_node("to")):
        return None
    return float(nx.maximum_flow_value(graph, "from", "to"))


def _contracted(topology: Topology) -> dict[tuple[object, object], float]:
    """Return capacities between groups of nodes: each half of the ranks with the servers they fill, bundles, other
    nodes."""
    half = (len(topology.ranks) + 1) // 2
    side = {node: "from" if rank < half else "to" for rank, node in enumerate(topology.ranks.tolist())}
    sides: dict[object, set[str]] = {}
    for node, name in side.items():
        sides.setdefault(_holder(topology, node), set()).add(name)
    groups: list[object] = []
    for index, node in enumerate(topology.nodes):
        whole = sides.get(_holder(topology, index), set())
        if len(whole) == 1 or index in side:
            groups.append(side.get(index) or min(whole))
        else:
            groups.append(("bundle", node.bundle) if node.bundle else index)
    flows: dict[tuple[object, object], float] = {}
    for a, b, rate in zip(topology.source.tolist(), topology.target.tolist(), topology.capacity.tolist(), strict=True):
        if groups[a] != groups[b] and rate and groups[b] != "from" and groups[a] != "to":
            flows[groups[a], groups[b]] = flows.get((groups[a], groups[b]), 0.0) + rate
    return flows


def oversubscription(topology: Topology) -> dict[int, float]:
    """Return for each tier of switches with others above it: bytes/s from below over bytes/s to above."""
    tiers = np.array([node.tier for node in topology.nodes])
    switches = np.array([node.kind == "switch" for node in topology.nodes])
    there, here, capacity = tiers[topology.source], tiers[topology.target], topology.capacity
    found = {}
    for tier in sorted(set(tiers[switches].tolist())):
        below = capacity[switches[topology.target] & (here == tier) & (there < tier)].sum()
        above = capacity[switches[topology.source] & (there == tier) & (here > tier)].sum()
        if above and below:
            found[tier] = float(below / above)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class BiGraph:
    """Two parts of switches, each switch linked once to every switch of the other part and to none of its own.

    All switches have hosts or servers.

    Attributes:
        place: of each rank, the server or host it is in, int64 (ranks,); places are numbered by switch.
        switch: of each place its switch: 0 to H − 1 in the upper part, H to 2H − 1 in the lower one, int64 (places,).
        half: H.
    """

    place: NDArray[np.int64]
    switch: NDArray[np.int64]
    half: int


def as_bigraph(topology: Topology) -> BiGraph | None:
    """Return ``topology`` as a BiGraph whose every server has all its cables at one switch; None if it is none."""
    kinds = np.array([node.kind == "switch" for node in topology.nodes])
    switches = np.flatnonzero(kinds)
    half, odd = divmod(len(switches), 2)
    if odd or not half:
        return None
    number = np.full(len(kinds), -1)
    number[switches] = np.arange(len(switches))
    between = kinds[topology.source] & kinds[topology.target]
    linked = np.zeros((len(switches), len(switches)), np.int64)
    np.add.at(linked, (number[topology.source[between]], number[topology.target[between]]), 1)
    upper = np.flatnonzero(linked[0] == 0)
    lower = np.flatnonzero(linked[0])
    if len(upper) != half or len(lower) != half:
        return None
    order = np.concatenate([upper, lower])
    wanted = np.kron([[0, 1], [1, 0]], np.ones((half, half), np.int64))
    if not np.array_equal(linked[np.ix_(order, order)], wanted):
        return None
    places = _places(topology, kinds, number, np.argsort(order))
    if places is None or len(np.unique(places[1])) < len(switches):
        return None  # Switches without hosts: a leaf-spine, say.
    return BiGraph(*places, half)


def _places(
    topology: Topology, is_switch: NDArray[np.bool_], number: NDArray[np.int64], renumbered: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Return each rank's place and each place's switch; None where a place is at several switches."""
    at: dict[tuple[str, int], set[int]] = {}
    for link in np.flatnonzero(is_switch[topology.target] & ~is_switch[topology.source]).tolist():
        at.setdefault(_holder(topology, int(topology.source[link])), set()).add(int(number[topology.target[link]]))
    holders = [_holder(topology, node) for node in topology.ranks.tolist()]
    if any(len(at.get(holder, ())) != 1 for holder in holders):
        return None
    known: dict[tuple[str, int], int] = {}
    for holder in holders:
        known.setdefault(holder, len(known))
    switch = np.array([int(renumbered[min(at[holder])]) for holder in known])
    return np.array([known[holder] for holder in holders]), switch


def _holder(topology: Topology, node: int) -> tuple[str, int]:
    """Return what ``node`` is a part of: its server, or itself."""
    server = topology.nodes[node].server
    return ("server", server) if server >= 0 else ("node", node)
