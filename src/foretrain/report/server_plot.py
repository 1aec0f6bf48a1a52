"""A picture of what is inside servers: one of each that differ, GPUs in a row and what they hang on above them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from foretrain.network.topology.graph import Kind, Topology
from foretrain.report.palette import ORANGE, canvas
from foretrain.report.topology_layout import Wires, lines

if TYPE_CHECKING:
    import plotly.graph_objects as go

_SHOWN = 4
"""Different servers drawn side by side, the most frequent first."""

_ROWS: dict[Kind, float] = {
    "nvswitch": -1, "gpu": 0, "host": 0, "nic": 1, "pcie": 2, "switch": 3, "root": 3.4, "memory": 4.4, "storage": 4.4,
}  # fmt: skip
_COLOURS: dict[Kind, str] = {
    "gpu": "#2563eb", "host": "#2563eb", "nvswitch": "#16a34a", "nic": "#7c3aed", "pcie": "#64748b",
    "switch": "#0f172a", "root": "#0f172a", "memory": "#0891b2", "storage": "#ca8a04",
}  # fmt: skip


def different_servers(topology: Topology) -> list[tuple[list[int], int]]:
    """The nodes of a server of each that differ in parts, links or their states, and how many are like it."""
    members: defaultdict[int, list[int]] = defaultdict(list)
    for index, node in enumerate(topology.nodes):
        if node.server >= 0:
            members[node.server].append(index)
    found: dict[object, list[list[int]]] = {}
    for nodes in members.values():
        if len(nodes) > 1:
            found.setdefault(_signature(topology, nodes), []).append(nodes)
    alike = sorted(found.values(), key=len, reverse=True)
    return [(group[0], len(group)) for group in alike]


def _signature(topology: Topology, nodes: list[int]) -> object:
    number = {node: place for place, node in enumerate(nodes)}
    links = []
    for node in nodes:
        for link in range(int(topology.first[node]), int(topology.first[node + 1])):
            if (target := int(topology.target[link])) in number:
                state = (topology.rate[link], topology.latency[link], topology.up[link], topology.background[link])
                links.append((number[node], number[target], *state))
    return tuple((topology.nodes[node].kind, topology.nodes[node].slowdown) for node in nodes), tuple(links)


def inside(wires: Wires) -> go.Figure | None:
    """The figure; None where no server has anything inside. MissingExtra without plotly."""
    shown = different_servers(wires.topology)[:_SHOWN]
    if not shown:
        return None
    figure = canvas(
        460,
        columns=len(shown),
        hovermode="closest",
        margin={"l": 20, "r": 20, "t": 70, "b": 20},
        legend={"orientation": "h", "y": 1.12, "yanchor": "bottom"},
    )
    figure.update_xaxes(visible=False).update_yaxes(visible=False, range=[-2.2, 5])
    seen: set[str] = set()
    for column, (nodes, many) in enumerate(shown, 1):
        _draw(figure, wires, nodes, column, seen)
        title = f"server {wires.topology.nodes[nodes[0]].server}" + (f" and {many - 1} more" if many > 1 else "")
        figure.add_annotation(
            text=title, showarrow=False, xref=f"x{'' if column == 1 else column} domain", yref="paper", x=0.5, y=1.0
        )
    return figure


def _draw(figure: go.Figure, wires: Wires, nodes: list[int], column: int, seen: set[str]) -> None:
    import plotly.graph_objects as go

    topology = wires.topology
    places = np.full(len(topology.nodes), -1)
    places[nodes] = np.arange(len(nodes))
    bundles = wires.bundles(places)
    at = _positions(topology, nodes, list(bundles))
    names = [topology.nodes[node].name.partition(".")[2] or topology.nodes[node].name for node in nodes]
    paths = {(a, b): _path(at[a], at[b]) for a, b in bundles}
    where = {"xaxis": f"x{column}", "yaxis": f"y{column}"}
    figure.add_traces(lines(wires, bundles, paths, names, webgl=False, seen=seen, **where))
    parts = [topology.nodes[node] for node in nodes]
    edge = {"color": [ORANGE if part.slowdown > 1 else "#ffffff" for part in parts], "width": 3}
    marker = {"symbol": "square", "size": 15, "color": [_COLOURS[part.kind] for part in parts], "line": edge}
    texts = [
        f"<b>{part.name}</b><br>{part.kind}"
        + (f"<br>straggler: {part.slowdown:g} times slower" if part.slowdown > 1 else "")
        + ("<br>sums what passes through it" if part.reduces else "")
        for part in parts
    ]
    figure.add_trace(
        go.Scatter(
            x=[x for x, _ in at], y=[y for _, y in at], text=names, hovertext=texts, mode="markers+text",
            textposition="top center", textfont={"size": 9}, marker=marker, showlegend=False,
            hovertemplate="%{hovertext}<extra></extra>", **where,
        )
    )  # fmt: skip


def _positions(topology: Topology, nodes: list[int], pairs: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
    """GPUs in a row by their number, the rest over the middle of what hangs on it, one beside the other."""
    near: defaultdict[int, list[int]] = defaultdict(list)
    for a, b in pairs:
        near[a].append(b)
        near[b].append(a)
    kinds: list[Kind] = [topology.nodes[node].kind for node in nodes]
    x = {place: float(number) for number, place in enumerate(p for p, kind in enumerate(kinds) if _ROWS[kind] == 0)}
    at: dict[int, tuple[float, float]] = {place: (value, 0.0) for place, value in x.items()}
    taken: set[tuple[float, float]] = set()
    rest = [place for place in range(len(nodes)) if place not in x]
    ports = {p for p in rest if kinds[p] == "pcie" and any(kinds[q] in ("gpu", "nic") for q in near[p])}
    # Each after what it stands over or beside.
    rest.sort(key=lambda p: (p not in ports, kinds[p] != "pcie", kinds[p] in ("nic", "memory", "storage")))
    for place in rest:
        known = [at[other][0] for other in near[place] if other in at]
        row = _ROWS[kinds[place]] + (0.7 if kinds[place] == "pcie" and place not in ports else 0.0)
        shift = 0.4 if kinds[place] == "nic" else 0.0
        if shift and any(kinds[q] == "root" for q in near[place]):
            row, shift = 2.0, 1.2
        spot = sum(known) / len(known) + shift if known else 0.0
        while (round(spot, 3), row) in taken:
            spot += 0.6
        taken.add((round(spot, 3), row))
        at[place] = (spot, row)
    return [at[place] for place in range(len(nodes))]


def _path(a: tuple[float, float], b: tuple[float, float]) -> list[tuple[float, float]]:
    """A straight line, or a bow below where both ends are GPUs, between which others may stand."""
    if a[1] != b[1] or a[1] > 0 or abs(a[0] - b[0]) <= 1:
        return [a, b]
    depth = 0.25 * abs(a[0] - b[0])
    steps = np.linspace(0.0, 1.0, 13)
    return [(a[0] + t * (b[0] - a[0]), a[1] - 4 * depth * t * (1 - t)) for t in steps.tolist()]
