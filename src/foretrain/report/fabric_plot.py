"""Pictures of a network: its fabric, with switches in tiers above their servers, and the inside of its servers.

A fabric whose switches of one tier are linked to each other is drawn as a ring.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrain.network.topology.graph import Kind, Topology
from foretrain.report.document import BLUE, INK, ORANGE, Figure
from foretrain.report.topology_layout import DrawnLinks, lines

_NAMED = 48
"""Drawn points up to which each has its name beside it."""
_COLUMNS = 240
"""Servers side by side, before those of one switch are stacked."""


def fabric(wires: DrawnLinks) -> Figure:
    """Return the figure: a server is one point, whatever is inside."""
    topology = wires.topology
    places, members = _points(topology)
    bundles = wires.bundles(places)
    tiers = np.array([max(topology.nodes[node].tier for node in nodes) for nodes in members])
    x, y = _positions(tiers, list(bundles))
    figure = Figure(620, dragmode="pan", equal=any(tiers[a] == tiers[b] for a, b in bundles))
    figure.update_xaxes(visible=False).update_yaxes(visible=False)
    names = [_name(topology, nodes) for nodes in members]
    paths = {(a, b): ((x[a], y[a]), (x[b], y[b])) for a, b in bundles}
    for trace in (*lines(wires, bundles, paths, names), *_markers(topology, members, names, x, y)):
        figure.add_scatter(**trace)
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
    """Return coordinates with a row for each tier: the lowest grouped by common switches, others above members."""
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
    width = max(*left.values(), 1.0) - (1 if len(groups) > 1 else 0)
    for tier in sorted(set(tiers.tolist()) - {int(tiers.min())}):
        points = np.flatnonzero(tiers == tier).tolist()
        below = {p: [x[other] for other in near[p] if tiers[other] < tier] for p in points}
        points.sort(key=lambda p: sum(below[p]) / len(below[p]) if below[p] else 0.0)
        for number, point in enumerate(points):
            x[point], y[point] = width * (number + 0.5) / len(points) - 0.5, float(tier)
    return x, y


def _ring(x: list[float], y: list[float]) -> tuple[list[float], list[float]]:
    """Bend rows to circles, the lowest outside: links between neighbours of one row do not hide each other."""
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
) -> list[dict[str, Any]]:
    ranks = {node: rank for rank, node in enumerate(topology.ranks.tolist())}
    slow = [max(topology.nodes[node].slowdown for node in nodes) for nodes in members]
    computes = [any(node in ranks for node in nodes) for nodes in members]
    styles = (
        ("server" if any(len(nodes) > 1 for nodes in members) else "host", "square", BLUE, 9),
        ("switch", "circle", INK, 11),
    )
    made, top = [], max(y)
    for wanted, (label, symbol, colour, size) in zip((True, False), styles, strict=True):
        points = [p for p, one in enumerate(computes) if one == wanted]
        if not points:
            continue
        texts = [f"<b>{names[p]}</b>{_inside(topology, members[p], ranks, slow[p])}" for p in points]
        made.append(
            {
                "x": [x[p] for p in points],
                "y": [y[p] for p in points],
                "name": label,
                "hovertext": texts,
                "hovertemplate": "%{hovertext}",
                "text": [names[p] for p in points],
                "mode": "markers+text" if len(members) <= _NAMED else "markers",
                # Links of the highest go down, and would cross a name below.
                "textposition": ["top center" if y[p] == top else "bottom center" for p in points],
                "textsize": 10,
                "marker": {"symbol": symbol, "color": colour, "size": size if len(x) < 2000 else 5},
            }
        )
    if late := [p for p, factor in enumerate(slow) if factor > 1]:
        made.append(
            {
                "x": [x[p] for p in late],
                "y": [y[p] for p in late],
                "name": "straggler",
                "mode": "markers",
                "marker": {"symbol": "diamond-open", "color": ORANGE, "size": 20},
            }
        )
    return made


def _inside(topology: Topology, nodes: list[int], ranks: dict[int, int], slow: float) -> str:
    held = [ranks[node] for node in nodes if node in ranks]
    lines = [f"ranks {held[0]} to {held[-1]}" if len(held) > 1 else f"rank {held[0]}"] if held else []
    if len(nodes) == 1 and topology.nodes[nodes[0]].kind == "switch":
        lines.append(f"tier {topology.nodes[nodes[0]].tier}")
    if slow > 1:
        lines.append(f"straggler: {slow:g} times slower")
    return "".join(f"<br>{line}" for line in lines)


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
    """Return the nodes of one server of each kind (parts, links, their states), and how many are like it."""
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


def servers(wires: DrawnLinks) -> Figure | None:
    """Return the figure; None where no server has anything inside."""
    shown = different_servers(wires.topology)[:_SHOWN]
    if not shown:
        return None
    titles = [
        f"server {wires.topology.nodes[nodes[0]].server}" + (f" and {many - 1} more" if many > 1 else "")
        for nodes, many in shown
    ]
    figure = Figure(460, columns=len(shown), titles=titles)
    figure.update_xaxes(visible=False).update_yaxes(visible=False, range=[-2.2, 5])
    seen: set[str] = set()
    for column, (nodes, _) in enumerate(shown, 1):
        _draw(figure, wires, nodes, column, seen)
    return figure


def _draw(figure: Figure, wires: DrawnLinks, nodes: list[int], column: int, seen: set[str]) -> None:
    topology = wires.topology
    places = np.full(len(topology.nodes), -1)
    places[nodes] = np.arange(len(nodes))
    bundles = wires.bundles(places)
    at = _part_positions(topology, nodes, list(bundles))
    names = [topology.nodes[node].name.partition(".")[2] or topology.nodes[node].name for node in nodes]
    paths = {(a, b): _path(at[a], at[b]) for a, b in bundles}
    for trace in lines(wires, bundles, paths, names, seen=seen):
        figure.add_scatter(**trace, panel=column)
    parts = [topology.nodes[node] for node in nodes]
    edge = [ORANGE if part.slowdown > 1 else "" for part in parts]
    marker = {"symbol": "square", "size": 15, "color": [_COLOURS[part.kind] for part in parts], "edge": edge}
    texts = [
        f"<b>{part.name}</b><br>{part.kind}"
        + (f"<br>straggler: {part.slowdown:g} times slower" if part.slowdown > 1 else "")
        + ("<br>sums what passes through it" if part.reduces else "")
        for part in parts
    ]
    figure.add_scatter(
        panel=column,
        x=[x for x, _ in at],
        y=[y for _, y in at],
        text=names,
        hovertext=texts,
        mode="markers+text",
        textposition="top center",
        textsize=9,
        marker=marker,
        showlegend=False,
        hovertemplate="%{hovertext}",
    )


def _part_positions(
    topology: Topology, nodes: list[int], pairs: Sequence[tuple[int, int]]
) -> list[tuple[float, float]]:
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
