"""Parallel coordinates: an upright axis for everything that varies in a sweep, and a line across for each scenario."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from foretrain.experiments.result_table import Column, Row
from foretrain.report.palette import canvas
from foretrain.units import SECOND, format_rate, format_size, format_time

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST = 20_000
"""Lines that a browser still draws while someone waits."""
_INPUTS = ("workload", "batch", "sequence", "precision", "device", "cluster", "policy", "tuned", "jitter")
_OUTPUTS = ("samples_per_second", "iteration_time", "speedup", "gap")
_TICKS = 8
_MANY_NAMES = 40
"""Names on one axis that can still be read."""


def parallel(columns: Sequence[Column], rows: Sequence[Row]) -> go.Figure:
    """An axis for every input, axis of clusters and knob that varies, then one for each outcome.

    Axes whose values span more than a factor of five are logarithmic. A scenario that does not have a knob crosses its
    axis below all values. The cluster's own notation is left out where axes tell clusters apart, or where it is too
    much to read.
    """
    rows = rows[:: len(rows) // MOST + 1]
    known = {column.name: column for column in columns}
    axes = [column for column in columns if column.name.startswith(("axis_", "knob_"))]
    names = [known[name] for name in _INPUTS if name != "cluster" or not _tells(axes, rows)]
    wanted = [*names, *axes, *(known[name] for name in _OUTPUTS)]
    figure = canvas(560)
    dimensions = [made for column in wanted if (made := _dimension(column, [row[column.name] for row in rows]))]
    figure.add_parcoords(
        dimensions=dimensions,
        line={"color": [row["gap"] for row in rows], "colorscale": "Blues", "showscale": True, "cmin": 0},
        labelfont={"size": 12},
        tickfont={"size": 10},
    )
    if rows:
        # A few far ones shall not make all others look alike.
        gaps = sorted(row["gap"] for row in rows)
        figure.update_traces(line_cmax=max(gaps[int(0.95 * (len(gaps) - 1))], 0.01))
    return figure.update_layout(margin={"l": 70, "r": 40, "t": 60, "b": 30})


def _tells(axes: Sequence[Column], rows: Sequence[Row]) -> bool:
    clusters = {row["cluster"] for row in rows}
    points = {tuple(row[column.name] for column in axes if column.name.startswith("axis_")) for row in rows}
    return len(clusters) == len(points) or len(clusters) > _MANY_NAMES


def _dimension(column: Column, values: Sequence[Any]) -> dict[str, Any] | None:
    if len(set(values)) < 2:
        return None
    label = column.name.removeprefix("axis_").removeprefix("knob_").replace("_", " ")
    if column.kind in ("text", "flag"):
        texts = list(dict.fromkeys("none" if value is None else str(value) for value in values))
        places = {text: number for number, text in enumerate(texts)}
        numbers: list[float] = [places["none" if value is None else str(value)] for value in values]
        return {"label": label, "values": numbers, "tickvals": list(places.values()), "ticktext": texts}
    have = [value for value in values if value is not None]
    log = min(have) > 0 and max(have) > 5 * min(have)
    scaled = [None if value is None else math.log10(value) if log else float(value) for value in values]
    marks = _marks(have)
    ticks = [math.log10(mark) if log else float(mark) for mark in marks]
    texts = [written(column, mark) for mark in marks]
    low, high = min(one for one in scaled if one is not None), max(one for one in scaled if one is not None)
    below = low - ((high - low) or 1) / 8
    if len(have) < len(values):
        ticks, texts = [below, *ticks], ["none", *texts]
    return {
        "label": label,
        "values": [below if one is None else one for one in scaled],
        "tickvals": ticks,
        "ticktext": texts,
    }


def _marks(values: Sequence[float]) -> list[float]:
    """Some of ``values``, from the least to the largest, to write beside the axis."""
    ordered = sorted(set(values))
    if len(ordered) <= _TICKS:
        return ordered
    return [ordered[round(k * (len(ordered) - 1) / (_TICKS - 1))] for k in range(_TICKS)]


def written(column: Column, value: float | None) -> str:
    """A value of ``column`` for a person."""
    if value is None:
        return "none"
    if column.kind == "time":
        return format_time(value * SECOND)
    if column.kind == "rate":
        return format_rate(value)
    if column.kind == "size":
        return format_size(value)
    if column.kind == "share":
        return f"{value:.1%}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
