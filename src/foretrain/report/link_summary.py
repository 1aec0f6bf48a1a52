"""The links of a topology as a person wants to see them: kinds with their rates, what is wrong, how loaded they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretrain.network.topology.graph import Node, Topology
from foretrain.units import Time, format_rate, format_time

FINE, SHARED, SLOW, DOWN = range(4)
STATES = ("", "shared with other traffic", "slower than its kind", "down")
"""What a link may be, the worst last."""

_COMMON = 0.25
"""Part of a kind's links that have a rate which is no fault: the NVLinks of a mesh come in ones and twos."""


@dataclass(frozen=True, slots=True, eq=False)
class LinkKind:
    """Links between the same kinds of nodes on the same tiers, in both directions.

    Attributes:
        label: e.g. ``"gpu – nvswitch"`` or ``"switch 1 – switch 2"``, with the switches' tiers.
        links: which.
        rate: the least and the most, bytes/s.
        latency: the least and the most, ps.
    """

    label: str
    links: NDArray[np.int64]
    rate: tuple[float, float]
    latency: tuple[Time, Time]

    @property
    def rates(self) -> str:
        """As text."""
        return _range(*map(format_rate, self.rate))

    @property
    def latencies(self) -> str:
        """As text."""
        return _range(*map(format_time, self.latency))


def link_kinds(topology: Topology) -> list[LinkKind]:
    """All links by kind: those inside servers first, then those further and further up."""
    words = [_word(node) for node in topology.nodes]
    heights = [(node.tier, node.kind == "switch", word) for node, word in zip(topology.nodes, words, strict=True)]
    groups: dict[tuple[int, int, str], list[int]] = {}
    for link, (a, b) in enumerate(zip(topology.source.tolist(), topology.target.tolist(), strict=True)):
        low, high = (a, b) if heights[a] <= heights[b] else (b, a)
        label = f"{words[low]} – {words[high]}"
        groups.setdefault((heights[high][0], heights[low][0], label), []).append(link)
    kinds = []
    for (*_, label), members in sorted(groups.items()):
        links = np.array(members)
        rate, latency = topology.rate[links], topology.latency[links]
        spread = (float(rate.min()), float(rate.max())), (int(latency.min()), int(latency.max()))
        kinds.append(LinkKind(label, links, *spread))
    return kinds


def _word(node: Node) -> str:
    return f"switch {node.tier}" if node.kind == "switch" else node.kind


def _range(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


def link_states(topology: Topology, kinds: list[LinkKind]) -> NDArray[np.int64]:
    """What each link is, an index into `STATES`.

    A link is slower than its kind where its rate is below every rate that a quarter of the kind has.
    """
    states = np.full(topology.links, FINE)
    for kind in kinds:
        rates, counts = np.unique(topology.rate[kind.links], return_counts=True)
        common = rates[counts >= _COMMON * counts.sum()]
        if len(common):
            states[kind.links[topology.rate[kind.links] < common.min()]] = SLOW
    states[(topology.background > 0) & (states == FINE)] = SHARED
    states[~topology.up] = DOWN
    return states


def faults(topology: Topology, states: NDArray[np.int64]) -> list[str]:
    """A phrase for each kind of fault there is; empty where all is well."""
    counts = np.bincount(states, minlength=len(STATES)).tolist()
    found = [
        f"{counts[state]} link{'s' if counts[state] > 1 else ''} {STATES[state]}"
        for state in (DOWN, SLOW, SHARED)
        if counts[state]
    ]
    if slow := sum(node.slowdown > 1 for node in topology.nodes):
        worst = max(node.slowdown for node in topology.nodes)
        found.append(f"{slow} straggler{'s' if slow > 1 else ''}, up to {worst:g} times slower")
    return found
