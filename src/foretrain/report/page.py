"""Page of a comparison: one HTML file with bars, curves, timelines and tables. Its text is in ``page.html``."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foretrain.experiments import Comparison, ParameterSweep, fastest
from foretrain.files import write_atomically
from foretrain.planner.choice import usual
from foretrain.report.document import BLUE, GREY, INK, ORANGE, SERIES, Card, Figure, document
from foretrain.report.release_plot import staircase
from foretrain.report.table import describe, labels, optimum, ranking, rows, tied
from foretrain.report.timeline_plot import lanes
from foretrain.schedule import IDEAL, POLICIES, Bound
from foretrain.simulation import Run
from foretrain.units import MICROSECOND, MILLISECOND, Time, format_time

_SHOWN = 3
"""Schedules whose lanes are shown at first."""


@dataclass(frozen=True, slots=True)
class BoundTerm:
    """Summand of T*: its label, its text and its share of T* in percent."""

    label: str
    time: str
    share: float


def page(comparison: Comparison, path: str | os.PathLike[str], command: str = "") -> None:
    """Write the page of ``comparison`` to ``path``, whole or not at all; ``command`` is shown to copy.

    MissingExtra without Jinja2.
    """
    write_atomically(path, render(comparison, command))


def render(comparison: Comparison, command: str = "") -> str:
    """Return the page as text; the same comparison gives the same text."""
    drawn = [run for run in ranking(comparison) if len(run.timeline)]
    return document(
        "page.html",
        _figures(comparison, drawn),
        command=command,
        comparison=comparison,
        good=comparison.advice.worth_it,
        workload=describe(comparison.workload),
        verdict=comparison.advice.verdict,
        reasons=comparison.advice.reasons[:1].upper() + comparison.advice.reasons[1:] + ".",
        cards=cards(comparison),
        parts=parts(comparison.bound),
        rows=rows(comparison),
        optimum=optimum(comparison),
        drawn=_names(comparison, drawn),
        shown=[any(run is one for one in _opening(comparison, drawn)) for run in drawn],
        policies={run.schedule.name: _about(run) for run in ranking(comparison)},
    )


def cards(comparison: Comparison) -> list[Card]:
    """Return the key numbers, in the order of the page."""
    best, baseline, bound = fastest(ranking(comparison)), comparison.baseline, comparison.bound
    limit = baseline.iteration_time / bound.time
    gain = f"{comparison.speedup(best):.2f} ± {comparison.advice.deviation:.2f}×"
    return [
        Card("Optimum T*", format_time(bound.time), "no schedule can be faster on this network"),
        _choice(comparison, best),
        Card("Speed-up", gain, f"over DDP at its best, ± as forecasts were off in the lab; {limit:.2f}× would be T*"),
        Card(
            "Exposed communication",
            format_time(best.exposed),
            f"{best.idle:.0%} of the iteration; {format_time(baseline.exposed)} with DDP",
        ),
        _binding(bound),
    ]


def _choice(comparison: Comparison, best: Run) -> Card:
    alike = [run.schedule.name for run in ranking(comparison) if tied(run, best) and run.schedule.name != IDEAL]
    names = list(dict.fromkeys(alike))
    listed = ", ".join(names)
    if not comparison.advice.worth_it:
        slower = comparison.speedup(best) - 1
        if "ddp" in names or slower <= 0:
            note = f"as fast, within 0.5 %: {listed}" if len(names) > 1 else "the fastest of all that were compared"
        else:
            note = f"{slower:.1%} slower than the fastest: {listed}"
        return Card("Schedule", "keep DDP", note)
    error = usual(comparison.cluster).forecast
    note = f"{format_time(best.iteration_time)} ± {error:.1%}, {best.gap:.1%} above T*"
    compared = {run.schedule.name for run in comparison.runs} - {"ddp", IDEAL}
    title = "Best schedule" if len(compared) > 1 else "Schedule compared"
    return Card(title, best.schedule.name, note + (f"; as fast: {listed}" if len(names) > 1 else ""))


def _binding(bound: Bound) -> Card:
    if bound.kind == "compute-bound":
        return Card("What binds", "the GPU", "communication can hide behind the computation")
    why = {
        "embedding-bound": "embedding-bound: what comes last is needed first",
        "communication-bound": "communication-bound: the link is too slow for all that is at least as urgent",
    }
    return Card("Binding layer", bound.layer, why[bound.kind])


def parts(bound: Bound) -> list[BoundTerm]:
    """Return the summands of T*; empty where the computation alone decides."""
    if bound.kind == "compute-bound":
        return []
    return [
        _part("backward pass until the gradient exists", bound.release, bound.time),
        _part("sending it and all that is at least as urgent", bound.communication, bound.time),
        _part("update and forward pass still to do", bound.tail, bound.time),
    ]


def _part(label: str, time: Time, whole: Time) -> BoundTerm:
    return BoundTerm(label, format_time(time), 100 * time / whole)


def _figures(comparison: Comparison, drawn: list[Run]) -> dict[str, Figure]:
    figures = {"bars": bars(comparison), "staircase": staircase(comparison.workload)}
    if drawn:
        figures["lanes"] = lanes(drawn, shown=_opening(comparison, drawn), names=_names(comparison, drawn))
    if comparison.sweep:
        best, baseline = comparison.best.schedule.name, comparison.baseline.schedule.name
        keys = {key.partition("(")[0]: key for key in comparison.sweep.times}
        figures["curves"] = curves(comparison.sweep, keys.get(best, ""), keys.get(baseline, ""))
    return figures


def _opening(comparison: Comparison, drawn: list[Run]) -> list[Run]:
    """Return the baseline, and the fastest that do not do the same: what tells most at first sight."""
    # By name, because the baseline itself may have been simulated without a timeline.
    chosen = [run for run in drawn if run.schedule.name == comparison.baseline.schedule.name][:1]
    times = {run.iteration_time for run in chosen}
    for run in drawn:
        if len(chosen) < _SHOWN and run.iteration_time not in times:
            chosen.append(run)
            times.add(run.iteration_time)
    return chosen


def _names(comparison: Comparison, drawn: list[Run]) -> list[str]:
    """Return the table's labels of the runs in ``drawn``."""
    everyone = ranking(comparison)
    return [name for run, name in zip(everyone, labels(everyone), strict=True) if any(run is one for one in drawn)]


def _about(run: Run) -> str:
    """Describe a policy: the first paragraph of its documentation."""
    return " ".join((POLICIES[run.schedule.name].__doc__ or "").partition("\n\n")[0].split())


_AXES: Mapping[str, tuple[float, str]] = {
    "rate": (1e9 / 8, "rate of a host (Gb/s)"),
    "latency": (MICROSECOND, "latency (µs)"),
    "overhead": (MICROSECOND, "θ per operation (µs)"),
    "workers": (1, "hosts"),
}
"""Of each swept parameter its unit in a picture and its title."""


def bars(comparison: Comparison) -> Figure:
    """Iteration time of every schedule, fastest on top: computation, and what nothing hides; lines at both bounds."""
    runs = ranking(comparison)
    names = labels(runs)
    compute = comparison.workload.compute / MILLISECOND
    figure = Figure(34 * len(runs) + 120, barmode="stack")
    totals = [format_time(run.iteration_time) for run in runs]
    hover = "<b>%{y}</b><br>%{customdata}"
    for label, color, widths in (
        ("computation", BLUE, [compute] * len(runs)),
        ("exposed communication and update", ORANGE, [run.exposed / MILLISECOND for run in runs]),
    ):
        figure.add_bar(
            x=widths,
            y=names,
            name=label,
            marker={"color": color},
            customdata=[
                f"{total} = {format_time(run.workload.compute)} of computation + {format_time(run.exposed)} exposed"
                for run, total in zip(runs, totals, strict=True)
            ],
            hovertemplate=hover,
        )
    figure.data[-1]["text"] = totals
    _add_limit(figure, comparison.bound.time, "T*", "dot", "left")
    _add_limit(figure, comparison.bound.compute, "computation", "dash", "right")
    slowest = max(run.iteration_time for run in runs) / MILLISECOND
    figure.update_xaxes(title="iteration (ms)", range=[0, slowest * 1.09])
    figure.update_yaxes(autorange="reversed")
    return figure


def _add_limit(figure: Figure, time: Time, name: str, dash: str, side: str) -> None:
    x = time / MILLISECOND
    figure.add_line(x=x, color=INK, dash=dash, label=f"{name} {format_time(time)}", side=side)


def curves(sweep: ParameterSweep, best: str = "", baseline: str = "ddp") -> Figure:
    """Iteration time over the swept parameter, also as a multiple of T*. ``best`` and ``baseline`` stand out."""
    unit, title = _AXES[sweep.parameter]
    xs = [value / unit for value in sweep.values]
    figure = Figure(480, columns=2)
    for (name, times), style in zip(sweep.times.items(), _lines(list(sweep.times), best, baseline), strict=True):
        hover = f"<b>{name}</b><br>%{{customdata}}"
        notes = [
            f"{sweep.label(value)}: {format_time(time)}, {time / optimum:.3f} T*"
            for value, time, optimum in zip(sweep.values, times, sweep.optimum, strict=True)
        ]
        ratios = [time / optimum for time, optimum in zip(times, sweep.optimum, strict=True)]
        for column, values in ((1, [time / MILLISECOND for time in times]), (2, ratios)):
            figure.add_scatter(
                x=xs,
                y=values,
                name=name,
                legendgroup=name,
                showlegend=column == 1,
                mode="lines+markers",
                marker={"size": 5},
                line=style,
                customdata=notes,
                hovertemplate=hover,
                panel=column,
            )
    _add_bounds(figure, sweep, xs)
    _scale(figure, sweep, xs, title)
    return figure


def _lines(names: Sequence[str], best: str, baseline: str) -> list[dict[str, object]]:
    """A line style each: blue and thick for the best, black for the baseline, muted for the rest."""
    rest = [name for name in names if name not in (best, baseline)]
    colors = {name: SERIES[index % len(SERIES)] for index, name in enumerate(rest)}
    special = {baseline: {"color": INK, "width": 2.5}, best: {"color": BLUE, "width": 3}}
    return [special.get(name) or {"color": colors[name], "width": 1.3} for name in names]


def _add_bounds(figure: Figure, sweep: ParameterSweep, xs: Sequence[float]) -> None:
    optimum = [time / MILLISECOND for time in sweep.optimum]
    notes = [f"{sweep.label(v)}: {format_time(t)}" for v, t in zip(sweep.values, sweep.optimum, strict=True)]
    for name, values, dash, color in (
        ("T*", optimum, "dot", INK),
        ("computation alone", [sweep.compute / MILLISECOND] * len(xs), "dash", GREY),
    ):
        figure.add_scatter(
            x=xs,
            y=values,
            name=name,
            legendgroup=name,
            mode="lines",
            line={"color": color, "width": 2, "dash": dash},
            customdata=notes if name == "T*" else [format_time(sweep.compute)] * len(xs),
            hovertemplate=f"<b>{name}</b><br>%{{customdata}}",
        )
    figure.add_line(y=1, color=INK, width=2, dash="dot", panel=2)


def _scale(figure: Figure, sweep: ParameterSweep, xs: Sequence[float], title: str) -> None:
    times = [time / MILLISECOND for row in (sweep.optimum, *sweep.times.values()) for time in row]
    marks = round_values(min(xs), max(xs))
    figure.update_xaxes(type="log", title=title, tickvals=marks, ticktext=[f"{mark:g}" for mark in marks])
    marks = round_values(min(*times, sweep.compute / MILLISECOND), max(times))
    ticks = {"tickvals": marks, "ticktext": [f"{mark:g}" for mark in marks]}
    figure.update_yaxes(1, type="log", title="iteration (ms)", **ticks)
    figure.update_yaxes(2, title="iteration / T*")
    worst = max(t / o for row in sweep.times.values() for t, o in zip(row, sweep.optimum, strict=True))
    # Beyond twice the optimum nobody cares by how much; a double click shows all of a curve that leaves the frame.
    top = min(worst, 2.0) - 1
    figure.update_yaxes(2, range=[1 - 0.05 * top, 1 + 1.08 * top] if top else None)


def round_values(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten from just below ``low`` to just above ``high``: ticks of a log axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    return [value for value in values if low / 1.6 <= value <= high * 1.6]
