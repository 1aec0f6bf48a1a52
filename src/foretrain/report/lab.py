"""Report of the lab: a table for a terminal, a page, and a trace of the real run beside its forecast."""

from __future__ import annotations

import os
from dataclasses import dataclass
from statistics import median

from rich.console import Group
from rich.table import Table
from rich.text import Text

from foretrain.files import write_atomically
from foretrain.lab.result import CaseResult, LabResult
from foretrain.report.document import BLUE, GREY, INK, ORANGE, Card, Figure, document
from foretrain.report.table import describe
from foretrain.report.timeline_plot import lanes
from foretrain.report.trace import write_trace
from foretrain.schedule import Spec
from foretrain.schedule.script import Written
from foretrain.units import MILLISECOND, Time, format_rate, format_size, format_time

_WORTH = 1.03


@dataclass(frozen=True, slots=True)
class LabRow:
    """Line of the table as text.

    Attributes:
        name: of the case.
        marks: some of ``"best"`` and ``"baseline"``.
        iteration: the median, ms.
        spread: the middle half, ms.
        speedup: over the baseline.
        ratio: T/T*, of what the case sends.
        forecast: simulated iteration time, ms.
        error: of the forecast.
        idle: share of the time in which the accelerator had nothing to compute.
        link: share of its rate that the busiest link carried in its busier direction.
        cores: how many the processes of all hosts kept busy.
        schedule: the one that ran, with its knobs.
        problem: why there are no numbers.
    """

    name: str
    marks: tuple[str, ...] = ()
    iteration: str = ""
    spread: str = ""
    speedup: str = ""
    ratio: str = ""
    forecast: str = ""
    error: str = ""
    idle: str = ""
    link: str = ""
    cores: str = ""
    schedule: str = ""
    problem: str = ""


def rows(result: LabResult) -> list[LabRow]:
    """A row for every case, fastest first; last those that did not run."""
    ranked = sorted(result.measured, key=lambda one: one.time)
    refused = [LabRow(one.case.name, problem=one.problem) for one in result.measurements if not one.rounds]
    return [_row(result, one) for one in ranked] + refused


def _row(result: LabResult, one: CaseResult) -> LabRow:
    low, high = one.spread
    return LabRow(
        name=one.case.name,
        marks=("best",) * (one is result.best) + ("baseline",) * (one is result.baseline),
        iteration=_milliseconds(one.time),
        spread=f"{_milliseconds(low)}–{_milliseconds(high)}",
        speedup=f"{result.speedup(one):.2f}×",
        ratio=f"{one.gap + 1:.3f}",
        forecast=_milliseconds(one.forecast.iteration_time) if one.forecast else "",
        error=f"{one.error:+.1%}" if one.error is not None else "",
        idle=f"{one.idle:.0%}" if one.idle is not None else "",
        link=f"{one.utilisation:.0%}" if one.utilisation is not None else "",
        cores=f"{one.busy:.2g}" if one.busy is not None else "",
        schedule=str(one.schedule) if one.case.kind == "attach" else "",
    )


def _milliseconds(time: Time) -> str:
    return f"{time / MILLISECOND:.0f}" if time >= 100 * MILLISECOND else f"{time / MILLISECOND:.4g}"


def verdict(result: LabResult) -> str:
    """Return the main finding as a sentence."""
    best, baseline = result.best, result.baseline
    if best is None or baseline is None:
        return "Measured; without both a baseline and a schedule there is nothing to compare"
    gain = result.speedup(best)
    if gain < 1:
        return f"No schedule beat {_baseline(result)}; {best.case.name} is {1 / gain - 1:.1%} slower"
    what = f"{best.case.name} makes an iteration {gain:.2f}× ({_range(result)}) as fast as {_baseline(result)} here"
    return what if gain >= _WORTH else f"Nothing much to gain: {what}"


def _range(result: LabResult) -> str:
    """Return the best case's speed-up between the middle halves of iterations, as text."""
    assert result.best is not None
    low, high = result.speedup_range(result.best)
    return f"{low:.2f} to {high:.2f}×"


def _baseline(result: LabResult) -> str:
    assert result.baseline is not None
    how = "the servers without a scheduler" if result.served else "DDP at its best"
    return f"{result.baseline.case.name}, {how}"


def reasons(result: LabResult) -> str:
    """Return the distance to the optimum and the errors of forecasts, as a sentence."""
    parts = []
    if result.best:
        parts.append(f"that is {result.best.gap:.1%} above the optimum, {format_time(result.best.bound.time)}")
        parts += _losses(result.best)
    errors = [abs(one.error) for one in result.measured if one.error is not None]
    if errors:
        parts.append(f"forecasts were off by {median(errors):.1%} in the median and {max(errors):.1%} at most")
    return "; ".join(parts)


def _losses(one: CaseResult) -> list[str]:
    """Return the causes of the distance to the optimum, in percentage points."""
    if one.losses is None:
        return []
    lost = one.losses
    return [
        f"of these, {100 * lost.link:.1f} points go to links that carry less than they are called, "
        f"{100 * lost.policy:.1f} to order and partitions, {100 * lost.operations:.1f} to agreement and start of "
        f"operations, {100 * lost.cores:.1f} to messages and threads that queue for a core, "
        f"{100 * lost.unforeseen:.1f} to what was not forecast"
    ]


def lab_summary(result: LabResult) -> Group:
    """Return lab, workload, costs, table and findings for ``rich.print``."""
    good = result.best is not None and result.baseline is not None and result.speedup(result.best) >= _WORTH
    return Group(
        Text.assemble(("lab       ", "dim"), str(result)),
        Text.assemble(("workload  ", "dim"), describe(result.workload)),
        Text.assemble(("measured  ", "dim"), f"{_operation(result)}: {costs(result)}"),
        Text(""),
        lab_table(result),
        _caption(result),
        Text(""),
        Text(f"{verdict(result)}; {reasons(result)}.", style="bold green" if good else "bold yellow"),
    )


def _operation(result: LabResult) -> str:
    return "a round through the servers" if result.served else "gloo's all-reduce"


def costs(result: LabResult) -> str:
    """Return the cost of an operation in this lab, as text."""
    place = result.cluster
    return (
        f"links as good as {format_rate(place.up)}, θ {format_time(place.overhead)} an operation, "
        f"{format_time(place.floor)} at least"
    )


def lab_table(result: LabResult) -> Table:
    """Return a table of all cases, fastest first."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("case", overflow="fold")  # the one column that a narrow terminal may break
    against = "vs fifo" if result.served else "vs DDP"
    for head in ("ms", "middle half", against, "T/T*", "forecast", "error", "idle", "link", "cores"):
        table.add_column(head, justify="right", no_wrap=True)
    for line in rows(result):
        name = Text(line.name)
        if line.marks:
            name.append(f" ({', '.join(line.marks)})")
        style = "bold green" if "best" in line.marks else "bold" if "baseline" in line.marks else ""
        if line.problem:
            table.add_row(name, "refused", style="dim")
            continue
        cells = (line.iteration, line.spread, line.speedup, line.ratio, line.forecast, line.error)
        table.add_row(name, *cells, line.idle, line.link, line.cores, style=style)
    return table


def _caption(result: LabResult) -> Text:
    one, against = result.experiment, "vs fifo" if result.served else "vs DDP"
    return Text(
        f"ms: median of {one.iterations} iterations in {one.rounds} interleaved rounds, after warm-up; "
        f"{against}: over {_baseline(result) if result.baseline else 'nothing'}; T*: no schedule can be faster on "
        "links of this rate; forecast: simulated, in ms; idle: of host 0's accelerator; link: the busiest; "
        "cores: how many all hosts keep busy",
        style="dim",
    )


# The page.


def lab_page(result: LabResult, path: str | os.PathLike[str], command: str = "") -> None:
    """Write the page of ``result`` to ``path``, whole or not at all. MissingExtra without Jinja2."""
    write_atomically(path, render(result, command))


def lab_trace(result: LabResult, path: str | os.PathLike[str]) -> None:
    """Write the timelines of traced runs, each real run beside its forecast; see `report.trace.write_trace`."""
    write_trace([run for one in result.measured for run in one.runs], path)


def render(result: LabResult, command: str = "") -> str:
    """Return the page as text."""
    runs = [run for one in _ranked(result) for run in one.runs]
    opening = _opening(result)
    shown = [run for run in runs if run.schedule in opening] or runs[:2]
    figures = {"bars": bars(result), "costs": fitted(result)}
    if runs:
        figures["lanes"] = lanes(runs, shown=shown, names=[run.schedule.name for run in runs])
    good = result.best is not None and result.speedup(result.best) >= _WORTH
    return document(
        "lab.html",
        figures,
        command=command,
        result=result,
        good=good,
        verdict=verdict(result),
        reasons=reasons(result).capitalize() + ".",
        workload=describe(result.workload),
        costs=costs(result),
        operation=_operation(result),
        against=_baseline(result) if result.baseline else "the baseline",
        cards=cards(result),
        rows=rows(result),
        chips=[(run.schedule.name, any(run is one for one in shown)) for run in runs],
    )


def cards(result: LabResult) -> list[Card]:
    """Return the key numbers, in the order of the page."""
    best, baseline = result.best, result.baseline
    errors = [abs(one.error) for one in result.measured if one.error is not None]
    found = [Card("Communication / computation", f"{result.ratio:.2f}", f"on links of {format_rate(result.rate)}")]
    if best and baseline:
        gained = f"{_range(result)} between middle halves; {best.case.name} over {_baseline(result)}"
        found.append(Card("Speed-up", f"{result.speedup(best):.2f}×", gained))
    if best:
        found.append(Card("Optimum T*", format_time(best.bound.time), "no schedule can be faster on these links"))
        found.append(Card("T/T*", f"{best.gap + 1:.3f}", f"{format_time(best.time)} measured"))
    if errors:
        off = f"median of {len(errors)} cases; {max(errors):.1%} at most"
        found.append(Card("Forecast error", f"{median(errors):.1%}", off))
    return found


def bars(result: LabResult) -> Figure:
    """Measured iteration times, fastest on top, with their middle half; forecasts as marks; T* as a line."""
    ranked = _ranked(result)
    names = [one.case.name for one in ranked]
    compute = result.workload.compute / MILLISECOND
    times = [one.time / MILLISECOND for one in ranked]
    figure = Figure(34 * len(ranked) + 120, barmode="stack")
    for label, color, widths in (
        ("computation", BLUE, [min(compute, time) for time in times]),
        ("exposed communication and update", ORANGE, [max(0.0, time - compute) for time in times]),
    ):
        hover = "<b>%{y}</b><br>%{customdata}"
        notes = [f"{format_time(one.time)} measured, {one.gap:.1%} above T*" for one in ranked]
        place = {"x": widths, "y": names, "marker": {"color": color}}
        figure.add_bar(**place, name=label, customdata=notes, hovertemplate=hover)
    spreads = [(one.spread[0] / MILLISECOND, one.spread[1] / MILLISECOND) for one in ranked]
    figure.data[-1]["error_x"] = {
        "plus": [high - time for time, (_, high) in zip(times, spreads, strict=True)],
        "minus": [time - low for time, (low, _) in zip(times, spreads, strict=True)],
    }
    forecasts = [one for one in ranked if one.forecast]
    figure.add_scatter(
        x=[one.forecast.iteration_time / MILLISECOND for one in forecasts if one.forecast],
        y=[one.case.name for one in forecasts],
        name="forecast",
        mode="markers",
        marker={"symbol": "diamond-open", "size": 10, "color": INK},
        customdata=[f"{one.error:+.1%}" for one in forecasts],
        hovertemplate="<b>%{y}</b><br>forecast %{x:.1f} ms, %{customdata}",
    )
    if result.best:
        x = result.best.bound.time / MILLISECOND
        figure.add_line(x=x, color=INK, dash="dot", label=f"T* {format_time(result.best.bound.time)}")
    figure.update_xaxes(title="iteration (ms)", rangemode="tozero")
    figure.update_yaxes(autorange="reversed")
    return figure


def fitted(result: LabResult) -> Figure:
    """Return a figure of exchange time over size, with the fitted line that forecasts use."""
    figure = Figure(360)
    for depth, color in zip(sorted({one.depth for one in result.samples}), (GREY, ORANGE), strict=False):
        chosen = [one for one in result.samples if one.depth == depth]
        figure.add_scatter(
            x=[one.size for one in chosen],
            y=[one.time / MILLISECOND for one in chosen],
            name=f"measured, {depth} under way",
            mode="markers",
            marker={"color": color, "size": 8},
            customdata=[format_size(one.size) for one in chosen],
            hovertemplate="%{customdata}: %{y:.3g} ms",
        )
    sizes = sorted({one.size for one in result.samples})
    figure.add_scatter(
        x=sizes,
        y=[result.cluster.cost.time(size) / MILLISECOND for size in sizes],
        name="max(floor, θ + κ·size)",
        mode="lines",
        line={"color": INK, "width": 1.5, "dash": "dot"},
    )
    figure.update_xaxes(
        type="log",
        title="size",
        tickvals=sizes,
        ticktext=[format_size(size) for size in sizes],
    )
    figure.update_yaxes(type="log", title=f"{_operation(result)} (ms)")
    return figure


def _ranked(result: LabResult) -> list[CaseResult]:
    return sorted(result.measured, key=lambda one: one.time)


def _opening(result: LabResult) -> set[Spec | Written]:
    """Return the schedules shown at first: the baseline and the best, each beside its forecast."""
    chosen = [one for one in (result.baseline, result.best) if one is not None]
    return {run.schedule for one in chosen for run in one.runs}
