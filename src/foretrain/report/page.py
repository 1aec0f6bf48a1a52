"""The page of a comparison: one HTML file to read, zoom and pass on. Its words are in ``page.html`` beside it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretrain.experiments import Comparison, fastest
from foretrain.files import write_atomically
from foretrain.report.curves import bars, curves
from foretrain.report.document import Card, document
from foretrain.report.release_plot import staircase
from foretrain.report.table import describe, labels, optimum, ranking, rows
from foretrain.report.timeline_plot import lanes
from foretrain.schedule import POLICIES, Bound
from foretrain.simulation import Run
from foretrain.units import Time, format_time

if TYPE_CHECKING:
    import plotly.graph_objects as go

_SHOWN = 3
"""Schedules whose lanes are shown at first."""


@dataclass(frozen=True, slots=True)
class BoundTerm:
    """One summand of T*: its label, its text and its share of T* in percent."""

    label: str
    time: str
    share: float


def page(comparison: Comparison, path: str | os.PathLike[str]) -> None:
    """Writes the page of ``comparison`` to ``path``, whole or not at all. MissingExtra without plotly or Jinja2."""
    write_atomically(path, render(comparison))


def render(comparison: Comparison) -> str:
    """The page as text; the same comparison gives the same text."""
    drawn = [run for run in ranking(comparison) if len(run.timeline)]
    return document(
        "page.html",
        _figures(comparison, drawn),
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
    """The key numbers, in the order of the page."""
    best, baseline, bound = fastest(ranking(comparison)), comparison.baseline, comparison.bound
    limit = baseline.iteration_time / bound.time
    return [
        Card("Optimum T*", format_time(bound.time), "no schedule can be faster on this network"),
        Card("Best schedule", best.schedule.name, f"{format_time(best.iteration_time)}, {best.gap:.1%} above T*"),
        Card("Speed-up", f"{comparison.speedup(best):.2f}×", f"over DDP at its best; {limit:.2f}× would be T*"),
        Card(
            "Exposed communication",
            format_time(best.exposed),
            f"{best.idle:.0%} of the iteration; {format_time(baseline.exposed)} with DDP",
        ),
        _binding(bound),
    ]


def _binding(bound: Bound) -> Card:
    if bound.kind == "compute-bound":
        return Card("What binds", "the GPU", "communication can hide behind the computation")
    why = {
        "embedding-bound": "embedding-bound: what comes last is needed first",
        "communication-bound": "communication-bound: the link is too slow for all that is at least as urgent",
    }
    return Card("Binding layer", bound.layer, why[bound.kind])


def parts(bound: Bound) -> list[BoundTerm]:
    """What T* is made of; empty where the computation alone decides."""
    if bound.kind == "compute-bound":
        return []
    return [
        _part("backward pass until the gradient exists", bound.release, bound.time),
        _part("sending it and all that is at least as urgent", bound.communication, bound.time),
        _part("update and forward pass still to do", bound.tail, bound.time),
    ]


def _part(label: str, time: Time, whole: Time) -> BoundTerm:
    return BoundTerm(label, format_time(time), 100 * time / whole)


def _figures(comparison: Comparison, drawn: list[Run]) -> dict[str, go.Figure]:
    figures = {"bars": bars(comparison), "staircase": staircase(comparison.workload)}
    if drawn:
        figures["lanes"] = lanes(drawn, shown=_opening(comparison, drawn), names=_names(comparison, drawn))
    if comparison.sweep:
        best, baseline = comparison.best.schedule.name, comparison.baseline.schedule.name
        keys = {key.partition("(")[0]: key for key in comparison.sweep.times}
        figures["curves"] = curves(comparison.sweep, keys.get(best, ""), keys.get(baseline, ""))
    return figures


def _opening(comparison: Comparison, drawn: list[Run]) -> list[Run]:
    """The baseline, and the fastest that do not do the same: what tells most at first sight."""
    # By name, because the baseline itself may have been simulated without a timeline.
    chosen = [run for run in drawn if run.schedule.name == comparison.baseline.schedule.name][:1]
    times = {run.iteration_time for run in chosen}
    for run in drawn:
        if len(chosen) < _SHOWN and run.iteration_time not in times:
            chosen.append(run)
            times.add(run.iteration_time)
    return chosen


def _names(comparison: Comparison, drawn: list[Run]) -> list[str]:
    """What the table calls each of ``drawn``, some of its rows."""
    everyone = ranking(comparison)
    return [name for run, name in zip(everyone, labels(everyone), strict=True) if any(run is one for one in drawn)]


def _about(run: Run) -> str:
    """What a policy does: the first paragraph of its module's documentation, without the name in front."""
    text = (sys.modules[POLICIES[run.schedule.name].__module__].__doc__ or "").partition("\n\n")[0]
    return " ".join(text.partition(": ")[2].split())
