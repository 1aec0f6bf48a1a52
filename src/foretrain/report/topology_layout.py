"""Lines between drawn points: a trace for each style, because thousands of lines are drawn fast only as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foretrain.network.topology.graph import Topology
from foretrain.report.link_summary import DOWN, FINE, SHARED, SLOW, STATES, LinkKind, link_kinds, link_states
from foretrain.report.palette import BLUE, ORANGE
from foretrain.units import format_rate, format_time

if TYPE_CHECKING:
    import plotly.graph_objects as go

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
class Wires:
    """The links of a topology, ready to be drawn.

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
    def of(cls, topology: Topology, used: NDArray[np.float64] | None = None) -> Wires:
        """All links of ``topology``."""
        kinds = link_kinds(topology)
        kind = np.zeros(topology.links, np.int64)
        for number, one in enumerate(kinds):
            kind[one.links] = number
        return cls(topology, kinds, kind, link_states(topology, kinds), used)

    def bundles(self, places: NDArray[np.int64]) -> dict[tuple[int, int], NDArray[np.int64]]:
        """The links between each two different ``places`` of their ends, of shape (nodes,); -1 is not drawn."""
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
        """What is said of one line that stands for ``links``."""
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
    wires: Wires,
    bundles: Mapping[tuple[int, int], NDArray[np.int64]],
    paths: Mapping[tuple[int, int], Sequence[tuple[float, float]]],
    names: Sequence[str],
    *,
    webgl: bool = True,
    seen: set[str] | None = None,
    **where: Any,
) -> list[go.Scatter | go.Scattergl]:
    """Traces of ``bundles`` along their ``paths``, the worst on top; ``seen`` keeps a label from two legends."""
    import plotly.graph_objects as go

    trace = go.Scattergl if webgl else go.Scatter
    groups: dict[tuple[str, str, str, float], _Group] = {}
    for pair, links in bundles.items():
        group = groups.setdefault(wires.style(links), _Group())
        path = paths[pair]
        group.x += [x for x, _ in path] + [None]
        group.y += [y for _, y in path] + [None]
        group.at.append((*_along(path), wires.hover(links, names[pair[0]], names[pair[1]])))
    made, shown = [], set() if seen is None else seen
    for (label, colour, dash, width), group in sorted(groups.items(), key=lambda item: item[0][3]):
        same: dict[str, Any] = {"legendgroup": label, "name": label} | where
        line = {"color": colour, "dash": dash, "width": width}
        first = label not in shown
        shown.add(label)
        made.append(trace(x=group.x, y=group.y, mode="lines", line=line, hoverinfo="skip", showlegend=first, **same))
        xs, ys, texts = zip(*group.at, strict=True)
        marker = {"color": colour, "size": 7, "opacity": 0.01 if len(xs) > 400 else 0.35}
        made.append(
            trace(
                x=xs, y=ys, text=texts, mode="markers", marker=marker, hovertemplate="%{text}<extra></extra>",
                showlegend=False, **same,
            )
        )  # fmt: skip
    return made


def _along(path: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Where a line is pointed at: a third along a straight one, whose middle others cross, and the top of a bow."""
    if len(path) > 2:
        return path[len(path) // 2]
    (x, y), (u, v) = path
    return x + 0.35 * (u - x), y + 0.35 * (v - y)
