"""Reports of a sweep: a summary for a terminal, JSON, and a page with parallel coordinates and the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from foretrain.experiments.result_table import Column, ParetoFront, Row, Table, best, front, over_seeds
from foretrain.files import write_atomically
from foretrain.planner.choice import ALL_REDUCE, SERVED
from foretrain.report.document import BLUE, LINE, SERIES, Card, Figure, document
from foretrain.report.table import foldable, plain_table
from foretrain.units import SECOND, format_rate, format_size, format_time

_SHOWN = 24
"""Rows of a summary; a file has them all."""


@dataclass(frozen=True, slots=True)
class SweepFindings:
    """Results of a sweep.

    Attributes:
        table: all results.
        rows: the same over seeds.
        best: of each workload and cluster.
        front: of each workload.
    """

    table: Table
    rows: tuple[Row, ...]
    best: tuple[Row, ...]
    front: ParetoFront


def findings(table: Table, objectives: Sequence[str] = ()) -> SweepFindings:
    """Evaluate ``table``. Raises ConfigError for objectives that it does not have."""
    rows = over_seeds(table)
    return SweepFindings(table, tuple(rows), tuple(best(rows)), front(rows, objectives))


def to_dict(found: SweepFindings) -> dict[str, Any]:
    """Return plain numbers for JSON: in seconds, bytes and bytes per second, as in the Parquet file."""
    return {
        "columns": {column.name: column.about for column in found.table.columns},
        "rows": list(found.table.rows),
        "best": list(found.best),
        "objectives": list(found.front.objectives),
        "front": {name: list(rows) for name, rows in found.front.rows.items()},
    }


@dataclass(frozen=True, slots=True)
class SweepRow:
    """A row of the summary as text."""

    place: str
    time: str
    speedup: str
    gap: str
    schedule: str


def lines(found: SweepFindings) -> list[SweepRow]:
    """Return the best of each workload and cluster; of many, those that gain most, in the sweep's order."""
    gaining = sorted(found.best, key=lambda row: -row["speedup"])[:_SHOWN]
    shown = {row["id"] for row in gaining}
    return [_line(row) for row in found.best if row["id"] in shown]


def _line(row: Row) -> SweepRow:
    return SweepRow(
        f"{workload_of(row)} on {row['cluster']}",
        format_time(row["iteration_time"] * SECOND),
        f"{row['speedup']:.2f}×",
        f"{row['gap']:.1%}",
        row["schedule"],
    )


def workload_of(row: Row) -> str:
    """Return the workload with its batch, precision and sequence length."""
    parts = [row["workload"], f"batch {row['batch']}", row["precision"]]
    if row["sequence"]:
        parts.append(f"{row['sequence']} tokens")
    return ", ".join(part for part in parts if part)


def verdict(found: SweepFindings) -> str:
    """Return the main finding as a sentence."""
    if not found.best:
        return "No scenario could be simulated"
    top = max(found.best, key=lambda row: row["speedup"])
    wins = sum(row["speedup"] >= 1.03 for row in found.best)
    return (
        f"On {wins} of {len(found.best)} workloads and clusters a schedule gains 3 % or more; at most "
        f"{top['speedup']:.2f} ± {_deviation(top):.2f}×, by {top['policy']} for {top['workload']} on {top['cluster']}"
    )


def _deviation(row: Row) -> float:
    """Return one standard deviation of a row's speed-up: how far forecasts were off in the lab."""
    served = row["exchange"] in ("ps", "ps_colocated", "parameter_server")
    return row["speedup"] * math.sqrt(2) * (SERVED if served else ALL_REDUCE).forecast


def reasons(found: SweepFindings) -> str:
    """Return the extent of the sweep as a sentence."""
    count, failed = len(found.table.rows), len(found.table.failed)
    parts = [f"{count:,} scenarios"]
    if any(row["seeds"] > 1 for row in found.rows):
        parts.append("medians over seeds")
    if failed:
        parts.append(f"{failed:,} could not be simulated, first: {found.table.failed[0]['error']}")
    return "; ".join(parts)


def _more(found: SweepFindings) -> str:
    left = len(found.best) - _SHOWN
    return f"Those that gain most; {left:,} more are in the file." if left > 0 else ""


def summary(found: SweepFindings) -> Group:
    """Return tables and findings for ``rich.print``."""
    shown: list[RenderableType] = []
    if found.best:
        shown += [_best_table(found), Text(_more(found), style="dim")]
        for name, rows in found.front.rows.items():
            shown += [_front_table(found, name, rows), Text("")]
    verdict_line = Text(f"{verdict(found)}.", style="bold green" if _good(found) else "bold yellow")
    return Group(*shown, verdict_line, Text(f"{reasons(found)}.", style="dim"))


def _best_table(found: SweepFindings) -> RichTable:
    made = plain_table()
    made.add_column("workload and cluster", overflow="fold")
    for name in ("iteration", "speed-up", "above T*"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("best schedule", overflow="fold")
    for line in lines(found):
        made.add_row(line.place, line.time, line.speedup, line.gap, foldable(line.schedule))
    return made


def _front_table(found: SweepFindings, name: str, rows: Sequence[Row]) -> RichTable:
    first, second = found.front.objectives
    made = plain_table()
    made.title_justify = "left"
    made.title = f"Pareto front of {name}" + (f" (the first {_SHOWN} of {len(rows)})" if len(rows) > _SHOWN else "")
    for objective in (second, first):
        made.add_column(objective, justify="right", no_wrap=True)
    for title in ("cluster", "schedule"):
        made.add_column(title, overflow="fold")
    for row in rows[:_SHOWN]:
        texts = (written(found.table.column(one), row[one]) for one in (second, first))
        made.add_row(*texts, row["cluster"], foldable(row["schedule"]))
    return made


def _good(found: SweepFindings) -> bool:
    return any(row["speedup"] >= 1.03 for row in found.best)


# The page.


def page(found: SweepFindings, path: Path, title: str, command: str = "") -> None:
    """Write one self-contained page. MissingExtra without Jinja2."""
    names = [one.replace("_", " ") for one in found.front.objectives]
    thinned = f" Shown are {MOST:,} of {len(found.rows):,}, evenly chosen." if len(found.rows) > MOST else ""
    write_atomically(
        path,
        document(
            "sweep.html",
            {"parallel": parallel(found.table.columns, found.rows), "front": _front_figure(found)},
            title=title,
            command=command,
            good=_good(found),
            verdict=verdict(found),
            reasons=f"{reasons(found)}.",
            cards=_cards(found),
            objectives=f"{names[0].capitalize()} against {names[1]}",
            rows=lines(found),
            more=_more(found),
            thinned=thinned,
        ),
    )


def _cards(found: SweepFindings) -> list[Card]:
    if not found.best:
        return [Card("scenarios", f"{len(found.table.rows):,}", "none could be simulated")]
    top = max(found.best, key=lambda row: row["speedup"])
    fast = max(found.best, key=lambda row: row["samples_per_second"])
    near = sum(row["gap"] <= 0.05 for row in found.best)
    return [
        Card("scenarios", f"{len(found.table.rows):,}", f"{len(found.best):,} workloads and clusters"),
        Card("largest gain", f"{top['speedup']:.2f} ± {_deviation(top):.2f}×", f"{top['policy']} on {top['cluster']}"),
        Card("largest throughput", f"{fast['samples_per_second']:,.0f}/s", f"{fast['workload']} on {fast['cluster']}"),
        Card("near the optimum", f"{near:,}", "workloads and clusters whose best is within 5 % of T*"),
    ]


def _front_figure(found: SweepFindings) -> Figure:
    """Return a figure of all scenarios as points, with a line along the front of each workload."""
    first, second = found.front.objectives
    figure = Figure(460)
    rows = found.rows[:: len(found.rows) // MOST + 1]
    _points(figure, rows, second, first, name="all scenarios", mode="markers", marker={"size": 4, "color": LINE})
    for index, (name, along) in enumerate(found.front.rows.items()):
        color = (BLUE, *SERIES)[index % (1 + len(SERIES))]
        style = {"color": color, "width": 2, "shape": "hv"}
        _points(figure, along, second, first, name=name, mode="lines+markers", line=style, marker={"size": 8})
    for update, one in ((figure.update_xaxes, second), (figure.update_yaxes, first)):
        wide = _wide([row[one] for row in rows if row[one] is not None])
        update(title=_titled(found, one), type="log" if wide else "linear")
    return figure


def _points(figure: Figure, rows: Iterable[Row], x: str, y: str, **style: Any) -> None:
    kept = [row for row in rows if row[x] is not None and row[y] is not None]
    figure.add_scatter(
        x=[row[x] * _SCALES.get(x, 1) for row in kept],
        y=[row[y] * _SCALES.get(y, 1) for row in kept],
        customdata=[f"{workload_of(row)} on {row['cluster']}<br>{row['schedule']}" for row in kept],
        hovertemplate="%{customdata}<br>%{y:.4g} at %{x:.4g}",
        **style,
    )


_SCALES = {"bandwidth": 8e-9}
"""Factors of objectives whose unit on an axis is another than in the table: bandwidth in Gb/s."""


def _wide(values: Sequence[float]) -> bool:
    return bool(values) and min(values) > 0 and max(values) > 5 * min(values)


def _titled(found: SweepFindings, name: str) -> str:
    units = {"time": "s", "rate": "bytes/s", "size": "bytes"}
    unit = "Gb/s" if name in _SCALES else units.get(found.table.column(name).kind)
    return name.replace("_", " ") + (f" ({unit})" if unit else "")


MOST = 20_000
"""Lines that a browser still draws while someone waits."""
_INPUTS = ("workload", "batch", "sequence", "precision", "device", "cluster", "policy", "tuned", "jitter")
_OUTPUTS = ("samples_per_second", "iteration_time", "speedup", "gap")
_TICKS = 8
_MANY_NAMES = 40
"""Names on one axis that can still be read."""


def parallel(columns: Sequence[Column], rows: Sequence[Row]) -> Figure:
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
    figure = Figure(560)
    dimensions = [made for column in wanted if (made := _dimension(column, [row[column.name] for row in rows]))]
    # A few far ones shall not make all others look alike.
    gaps = [row["gap"] for row in rows]
    most = max(sorted(gaps)[int(0.95 * (len(gaps) - 1))], 0.01) if gaps else 1.0
    figure.add_parcoords(dimensions=dimensions, color=gaps, most=most)
    return figure


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
    """Return up to `_TICKS` of ``values``, from the least to the largest, to write beside the axis."""
    ordered = sorted(set(values))
    if len(ordered) <= _TICKS:
        return ordered
    return [ordered[round(k * (len(ordered) - 1) / (_TICKS - 1))] for k in range(_TICKS)]


def written(column: Column, value: float | None) -> str:
    """Return a value of ``column`` as text with its unit."""
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
