"""Links of a topology: their kinds, rates and faults, and how they are drawn as lines between points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrain.network.topology.graph import Topology
from foretrain.report.document import BLUE, ORANGE
from foretrain.units import Time, format_rate, format_time

FINE, SHARED, SLOW, DOWN = range(4)
STATES = ("", "shared with other traffic", "slower than its kind", "down")
"""States of a link, the worst last."""

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
        """Range of rates as text."""
        return _range(*map(format_rate, self.rate))

    @property
    def latencies(self) -> str:
        """Range of latencies as text."""
        return _range(*map(format_time, self.latency))


def link_kinds(topology: Topology) -> list[LinkKind]:
    """Return all links by kind: those inside servers first, then by tier."""
    words = [f"switch {node.tier}" if node.kind == "switch" else node.kind for node in topology.nodes]
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


def _range(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


def link_states(topology: Topology, kinds: list[LinkKind]) -> NDArray[np.int64]:
    """Return the state of each link, an index into `STATES`.

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


_KINDS = ("#94a3b8", "#60a5fa", "#34d399", "#a78bfa", "#f472b6", "#22d3ee", "#a3e635", "#c4b5fd", "#5eead4")
_STATES = {SHARED: ("#ca8a04", "dot", 2.0), SLOW: (ORANGE, "solid", 2.5), DOWN: ("#dc2626", "dash", 2.5)}
_LOADS = (
    (0.0, "idle", "#e2e8f0", 1.0),
    (0.25, "up to 25 % used", "#93c5fd", 1.3),
    (0.5, "up to 50 % used", BLUE, 1.6),
    (0.75, "up to 75 % used", "#facc15", 2.0),
    (0.95, "up to 95 % used", ORANGE, 2.4),
    (float("inf"), "more than 95 % used", "#b91c1c", 2.8),
)
"""Bins of utilisation: up to where, in words, their colour and width."""


@dataclass(frozen=True, slots=True, eq=False)
class DrawnLinks:
    """Links of a topology, ready to be drawn.

    Attributes:
        topology: whose.
        kinds: of links.
        kind: of each link, an index into ``kinds``.
        states: of each link, an index into `STATES`.
        used: of each link the part of its rate that is used, 0 to 1; None where nobody measured.
    """

    topology: Topology
    kinds: list[LinkKind]
    kind: NDArray[np.int64]
    states: NDArray[np.int64]
    used: NDArray[np.float64] | None

    @classmethod
    def of(cls, topology: Topology, used: NDArray[np.float64] | None = None) -> DrawnLinks:
        """Return all links of ``topology``."""
        kinds = link_kinds(topology)
        kind = np.zeros(topology.links, np.int64)
        for number, one in enumerate(kinds):
            kind[one.links] = number
        return cls(topology, kinds, kind, link_states(topology, kinds), used)

    def bundles(self, places: NDArray[np.int64]) -> dict[tuple[int, int], NDArray[np.int64]]:
        """Return the links between each two different ``places`` of their ends, of shape (nodes,); -1 is not drawn."""
        a, b = places[self.topology.source], places[self.topology.target]
        links = np.flatnonzero((a != b) & (a >= 0) & (b >= 0))
        low, high = np.minimum(a, b)[links], np.maximum(a, b)[links]
        order = np.lexsort((high, low))
        pairs, starts = np.unique(np.stack([low[order], high[order]]), axis=1, return_index=True)
        groups = np.split(links[order], np.sort(starts)[1:]) if len(links) else []
        return {(int(x), int(y)): group for (x, y), group in zip(pairs.T.tolist(), groups, strict=True)}

    def style(self, links: NDArray[np.int64]) -> tuple[str, str, str, float]:
        """Label, colour, dash and width of one line that stands for ``links``."""
        state = int(self.states[links].max())
        if self.used is not None and self.topology.up[links].any():
            load = float(self.used[links].max())
            label, colour, width = next((label, colour, width) for most, label, colour, width in _LOADS if load <= most)
            return label, colour, "solid", width
        if state != FINE:
            return (STATES[state], *_STATES[state])
        kind = int(self.kind[links[0]])
        return self.kinds[kind].label, _KINDS[kind % len(_KINDS)], "solid", 1.2

    def hover(self, links: NDArray[np.int64], a: str, b: str) -> str:
        """Return the hover text of one line that stands for ``links``."""
        made = self.topology
        forth, lines = links[: (len(links) + 1) // 2], [f"<b>{a} – {b}</b>"]
        rates, latencies = made.rate[links], made.latency[links]
        many = f"{len(forth)} × " if len(forth) > 1 else ""
        slowest, fastest = format_rate(rates.min()), format_rate(rates.max())
        rate = slowest if slowest == fastest else f"{slowest} to {fastest}"
        lines.append(f"{many}{rate}, {format_time(int(latencies.max()))}")
        for state in sorted(set(self.states[links].tolist()) - {FINE}):
            links_in = links[self.states[links] == state]
            other = f": {format_rate(made.background[links_in].max())}" if state == SHARED else ""
            lines.append(f"{len(links_in)} of {len(links)} links {STATES[state]}{other}")
        if self.used is not None:
            lines.append(f"{float(self.used[links].max()):.1%} of the most used one")
        return "<br>".join(lines)


@dataclass(slots=True)
class _Group:
    x: list[float | None] = field(default_factory=list)
    y: list[float | None] = field(default_factory=list)
    at: list[tuple[float, float, str]] = field(default_factory=list)


def lines(
    wires: DrawnLinks,
    bundles: Mapping[tuple[int, int], NDArray[np.int64]],
    paths: Mapping[tuple[int, int], Sequence[tuple[float, float]]],
    names: Sequence[str],
    *,
    seen: set[str] | None = None,
) -> list[dict[str, Any]]:
    """Traces of ``bundles`` along their ``paths``, the worst on top; ``seen`` keeps a label from two legends."""
    groups: dict[tuple[str, str, str, float], _Group] = {}
    for pair, links in bundles.items():
        group = groups.setdefault(wires.style(links), _Group())
        path = paths[pair]
        group.x += [x for x, _ in path] + [None]
        group.y += [y for _, y in path] + [None]
        group.at.append((*_along(path), wires.hover(links, names[pair[0]], names[pair[1]])))
    made, shown = [], set() if seen is None else seen
    for (label, colour, dash, width), group in sorted(groups.items(), key=lambda item: item[0][3]):
        same: dict[str, Any] = {"legendgroup": label, "name": label}
        line = {"color": colour, "dash": dash, "width": width}
        first = label not in shown
        shown.add(label)
        made.append({"x": group.x, "y": group.y, "mode": "lines", "line": line, "showlegend": first, **same})
        xs, ys, texts = zip(*group.at, strict=True)
        marker = {"color": colour, "size": 7, "opacity": 0.01 if len(xs) > 400 else 0.35}
        shape = {"text": texts, "mode": "markers", "marker": marker, "hovertemplate": "%{text}", "showlegend": False}
        made.append({"x": xs, "y": ys, **shape, **same})
    return made


def _along(path: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the point of a line's hover text: a third along a straight line, or the top of a bow."""
    if len(path) > 2:
        return path[len(path) // 2]
    (x, y), (u, v) = path
    return x + 0.35 * (u - x), y + 0.35 * (v - y)
