"""A picture of a fabric: switches in tiers, servers below theirs; a ring where equals are linked to each other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foretrain.network.topology.graph import Topology
from foretrain.report.palette import BLUE, INK, ORANGE, canvas
from foretrain.report.topology_layout import Wires, lines

if TYPE_CHECKING:
    import plotly.graph_objects as go

_NAMED = 48
"""Drawn points up to which each has its name beside it."""
_COLUMNS = 240
"""Servers side by side, before those of one switch are stacked."""


def fabric(wires: Wires) -> go.Figure:
    """The figure: a server is one point, whatever is inside. MissingExtra without plotly."""
    topology = wires.topology
    places, members = _points(topology)
    bundles = wires.bundles(places)
    tiers = np.array([max(topology.nodes[node].tier for node in nodes) for nodes in members])
    x, y = _positions(tiers, list(bundles))
    figure = canvas(
        620,
        xaxis={"visible": False},
        yaxis={"visible": False},
        hovermode="closest",
        dragmode="pan",
        margin={"l": 20, "r": 20, "t": 50, "b": 20},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
    )
    names = [_name(topology, nodes) for nodes in members]
    paths = {(a, b): ((x[a], y[a]), (x[b], y[b])) for a, b in bundles}
    figure.add_traces(lines(wires, bundles, paths, names))
    figure.add_traces(_markers(topology, members, names, x, y))
    return figure


def _points(topology: Topology) -> tuple[NDArray[np.int64], list[list[int]]]:
    """For each node its point, and for each point its nodes: servers are one, other nodes are themselves."""
    numbers: dict[tuple[str, int], int] = {}
    places = np.zeros(len(topology.nodes), np.int64)
    for index, node in enumerate(topology.nodes):
        key = ("server", node.server) if node.server >= 0 else ("node", index)
        places[index] = numbers.setdefault(key, len(numbers))
    members: list[list[int]] = [[] for _ in numbers]
    for index, place in enumerate(places.tolist()):
        members[place].append(index)
    return places, members


def _positions(tiers: NDArray[np.int64], pairs: list[tuple[int, int]]) -> tuple[list[float], list[float]]:
    """Coordinates of every point from its tier and from which points it is linked to."""
    near: list[list[int]] = [[] for _ in tiers]
    for a, b in pairs:
        near[a].append(b)
        near[b].append(a)
    x, y = _rows(tiers, near)
    if any(tiers[a] == tiers[b] for a, b in pairs):
        return _ring(x, y)
    return x, y


def _rows(tiers: NDArray[np.int64], near: list[list[int]]) -> tuple[list[float], list[float]]:
    """One row a tier. The lowest is in groups of what hangs on the same switches, higher ones are above their own."""
    x, y = [0.0] * len(tiers), [0.0] * len(tiers)
    lowest = np.flatnonzero(tiers == tiers.min()).tolist()
    groups: dict[tuple[int, ...], list[int]] = {}
    for point in lowest:
        groups.setdefault(tuple(near[point]), []).append(point)
    most = max(map(len, groups.values()))
    columns = max(1, min(most, _COLUMNS // len(groups)))
    left = {False: 0.0, True: 0.0}
    for on, points in groups.items():
        # What hangs on a switch that has others below it stands above that: the upper part of a BiGraph.
        top = max((int(tiers[switch]) for switch in on if tiers[switch] > tiers.min()), default=0)
        above = len(on) == 1 and any(tiers.min() < tiers[other] < top for other in near[on[0]])
        for number, point in enumerate(points):
            row = 0.22 * (number // columns)
            x[point] = left[above] + number % columns
            y[point] = top + 0.8 + row if above else float(tiers[point]) - row
        left[above] += columns + (1 if len(groups) > 1 else 0)
    width = max(*left.values(), 2.0) - 1
    for tier in sorted(set(tiers.tolist()) - {int(tiers.min())}):
        points = np.flatnonzero(tiers == tier).tolist()
        below = {p: [x[other] for other in near[p] if tiers[other] < tier] for p in points}
        points.sort(key=lambda p: sum(below[p]) / len(below[p]) if below[p] else 0.0)
        for number, point in enumerate(points):
            x[point], y[point] = width * (number + 0.5) / len(points) - 0.5, float(tier)
    return x, y


def _ring(x: list[float], y: list[float]) -> tuple[list[float], list[float]]:
    """The rows bent to circles, the lowest outside: links between neighbours of one row do not hide each other."""
    left, width = min(x), max(x) - min(x) + 1
    top, bottom = max(y), min(y)
    turns = [2 * math.pi * (at - left) / width for at in x]
    radii = [1.0 + (top - at) * 0.35 if top > bottom else 1.0 for at in y]
    pairs = list(zip(turns, radii, strict=True))
    return [r * math.sin(t) for t, r in pairs], [r * math.cos(t) for t, r in pairs]


def _name(topology: Topology, nodes: list[int]) -> str:
    if len(nodes) == 1:
        return topology.nodes[nodes[0]].name
    return f"server {topology.nodes[nodes[0]].server}"


def _markers(
    topology: Topology, members: list[list[int]], names: list[str], x: list[float], y: list[float]
) -> list[go.Scattergl]:
    import plotly.graph_objects as go

    ranks = {node: rank for rank, node in enumerate(topology.ranks.tolist())}
    slow = [max(topology.nodes[node].slowdown for node in nodes) for nodes in members]
    computes = [any(node in ranks for node in nodes) for nodes in members]
    styles = (
        ("server" if any(len(nodes) > 1 for nodes in members) else "host", "square", BLUE, 9),
        ("switch", "circle", INK, 11),
    )
    made = []
    for wanted, (label, symbol, colour, size) in zip((True, False), styles, strict=True):
        points = [p for p, one in enumerate(computes) if one == wanted]
        if not points:
            continue
        texts = [f"<b>{names[p]}</b>{_inside(topology, members[p], ranks, slow[p])}" for p in points]
        made.append(
            go.Scattergl(
                x=[x[p] for p in points], y=[y[p] for p in points], name=label, hovertext=texts,
                hovertemplate="%{hovertext}<extra></extra>", text=[names[p] for p in points],
                mode="markers+text" if len(members) <= _NAMED else "markers", textposition="bottom center",
                textfont={"size": 10}, marker={"symbol": symbol, "color": colour, "size": size if len(x) < 2000 else 5},
            )
        )  # fmt: skip
    if late := [p for p, factor in enumerate(slow) if factor > 1]:
        made.append(
            go.Scattergl(
                x=[x[p] for p in late], y=[y[p] for p in late], name="straggler", mode="markers", hoverinfo="skip",
                marker={"symbol": "diamond-open", "color": ORANGE, "size": 20, "line": {"width": 3}},
            )
        )  # fmt: skip
    return made


def _inside(topology: Topology, nodes: list[int], ranks: dict[int, int], slow: float) -> str:
    held = [ranks[node] for node in nodes if node in ranks]
    lines = [f"ranks {held[0]} to {held[-1]}" if len(held) > 1 else f"rank {held[0]}"] if held else []
    if len(nodes) == 1 and topology.nodes[nodes[0]].kind == "switch":
        lines.append(f"tier {topology.nodes[nodes[0]].tier}")
    if slow > 1:
        lines.append(f"straggler: {slow:g} times slower")
    return "".join(f"<br>{line}" for line in lines)
