"""Reports of the planner: a table of all candidates, one of what-ifs, and a page of these."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from foretrain.files import write_atomically
from foretrain.planner.candidate_search import describe
from foretrain.planner.choice import Recommendation, usual
from foretrain.planner.what_if import WhatIfs
from foretrain.report.document import BLUE, GREY, Card, Figure, document
from foretrain.report.table import foldable, format_rate_of_samples, plain_table
from foretrain.units import format_time

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_LABEL = 16
"""Least width of a change, so that ``compression=fp16`` is not broken; the rest still fits into 80 columns."""


def candidates(choice: Recommendation) -> Group:
    """Every candidate, the fastest first: time, gain over DDP at its best, T/T*; then those skipped, and why."""
    from rich.console import Group
    from rich.text import Text

    timed = [one for one in choice.candidates if one.time is not None]
    compresses = any(one.compression for one in choice.candidates)
    made = plain_table()
    for name in ("schedule", "engine", *["sent as"] * compresses):
        made.add_column(name, overflow="fold")
    for name in ("iteration", "gain", "T/T*"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("", no_wrap=True)
    for one in timed:
        assert one.time is not None
        assert one.gap is not None
        marks = ["chosen"] * (one is choice.chosen) + ["baseline"] * (one is choice.baseline)
        sent = [one.compression or "it is"] * compresses
        numbers = [format_time(one.time), f"{choice.gain_of(one):+.1%}", f"{one.gap + 1:.3f}"]
        cells = [foldable(str(one.schedule)), describe(one.place), *sent, *numbers, ", ".join(marks)]
        made.add_row(*map(Text, cells), style="bold" if one is choice.chosen else "")
    return Group(made, *(Text(line, style="dim") for line in _skipped(choice)))


def _skipped(choice: Recommendation) -> list[str]:
    """Return the candidates not simulated: a line for each engine, compression and reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for one in choice.candidates:
        if one.time is None:
            sent = f" in {one.compression}" if one.compression else ""
            found.setdefault((f"{describe(one.place)}{sent}", one.why_not), []).append(one.schedule.name)
    return [f"{', '.join(names)} by {where} {why_not}" for (where, why_not), names in found.items()]


def precision(choices: Sequence[Recommendation]) -> str:
    """Return why ``foretrain compare`` may find another time, and states another ±, for what was chosen."""
    told = [
        "A search of knobs ends within 1 % of the schedule's bound, or after a few simulations; foretrain compare "
        "searches longer, and may find a shorter iteration."
    ]
    if any(choice.best is not choice.baseline for choice in choices):
        told.append(
            "± of a gain over DDP counts errors of the forecasts and of what they are given: rate, θ, latency and "
            "computation; compare's ± counts only the forecasts'."
        )
    return " ".join(told)


def what_ifs(found: WhatIfs) -> Table:
    """A row for each case; GPUs and engines where they differ. Knobs are in the page and in the numbers."""
    from rich.text import Text

    told = rows(found)
    differ = [name for name in ("GPUs", "engine") if len({row[name] for row in told}) > 1]
    numbers = [*["GPUs"] * ("GPUs" in differ), "iteration", "rate", "× now", "over DDP"]
    made = plain_table()
    made.add_column("what if", overflow="fold", min_width=min(_LABEL, max(len(row["what if"]) for row in told)))
    for name in numbers:
        title = f"{found.cases[0].workload.unit}/s" if name == "rate" else name
        made.add_column(title, justify="right", no_wrap=True)
    made.add_column("best schedule", overflow="fold")
    for case, row in zip(found.cases, told, strict=True):
        best = case.choice.schedule.name + (f" by {row['engine']}" if "engine" in differ else "")
        cells = [row["what if"], *(row[name] for name in numbers), best]
        made.add_row(*map(Text, cells), style="bold green" if case is found.most else "")
    return made


HEADS = ("what if", "GPUs", "iteration", "rate", "× now", "over DDP", "best schedule", "engine")
"""Columns of `rows`."""


def rows(found: WhatIfs) -> list[dict[str, str]]:
    """Return the columns of `HEADS` of each case, as text."""
    told = []
    for case in found.cases:
        choice, chosen = case.choice, case.choice.chosen
        sent = f", {chosen.compression}" if chosen.compression else ""
        cells = (
            case.label,
            f"{case.place.total_gpus:,}",
            format_time(choice.time),
            format_rate_of_samples(case.throughput),
            f"{found.factor(case):.2f}×",
            "–" if choice.falls_back else f"{choice.gain:.1%} ± {choice.uncertainty:.1%}",
            str(chosen.schedule),
            f"{describe(chosen.place)}{sent}",
        )
        told.append(dict(zip(HEADS, cells, strict=True)))
    return told


def page(found: WhatIfs, path: Path, command: str = "") -> None:
    """Write one self-contained page with all cases."""
    now, most = found.cases[0], found.most
    unit = now.workload.unit
    gain = f"{now.choice.gain:.1%} ± {now.choice.uncertainty:.1%}"
    error = usual(now.place).forecast
    cards = [
        Card(
            "now", f"{format_rate_of_samples(now.throughput)} {unit}/s", f"{format_time(now.choice.time)} ± {error:.1%}"
        ),
        Card("schedule now", now.choice.schedule.name, f"{gain} over DDP at its best"),
        Card("optimum now", format_time(now.choice.chosen.optimum.time), "T*, which no schedule beats"),
    ]
    if most is not None:
        rate = f"{format_rate_of_samples(most.throughput)} {unit}/s"
        cards.append(Card("helps most", most.label, f"{found.factor(most):.2f} ± {found.deviation(most):.2f}×: {rate}"))
    write_atomically(
        path,
        document(
            "planning.html",
            {"bars": bars(found)},
            title=f"{now.workload.name}: what if",
            unit=unit,
            command=command,
            good=most is not None,
            verdict=found.advice,
            reasons=", ".join(line.removeprefix("auto: ") for line in now.choice.lines) + ".",
            cards=cards,
            rows=rows(found),
            precision=precision([case.choice for case in found.cases]),
            most=most and most.label,
        ),
    )


def bars(found: WhatIfs) -> Figure:
    """Samples per second of each case."""
    names = [case.label for case in found.cases]
    figure = Figure(52 * len(names) + 110, showlegend=False)
    figure.add_bar(
        x=[case.throughput for case in found.cases],
        y=names,
        marker={"color": [BLUE if case is found.most else GREY for case in found.cases]},
        text=[f"{found.factor(case):.2f}×" for case in found.cases],
        customdata=[f"{case.choice.schedule}<br>{case.place}" for case in found.cases],
        hovertemplate="<b>%{y}</b><br>%{x:,.4g} a second<br>%{customdata}",
    )
    figure.update_xaxes(title=f"{found.cases[0].workload.unit} a second", rangemode="tozero")
    figure.update_yaxes(autorange="reversed")
    return figure
