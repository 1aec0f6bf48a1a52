"""What kind of fabric a topology is, read off its links, whatever it is called."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretrain.network.topology.graph import Topology


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
    """``topology`` as a BiGraph whose every server has all its cables at one switch; None if it is none."""
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
    """Of each rank its place, of each place its switch; None where a place is at several switches."""
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
    """What ``node`` is a part of: its server, or itself."""
    server = topology.nodes[node].server
    return ("server", server) if server >= 0 else ("node", node)
