"""What the planner found: a table of all candidates, one of what-ifs, and a page of these."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from foretrain.files import write_atomically
from foretrain.planning.choice import Recommendation
from foretrain.planning.engines import describe
from foretrain.planning.what_if import WhatIfs
from foretrain.report.document import Card, document
from foretrain.report.palette import BLUE, GREY, canvas
from foretrain.report.table import format_rate_of_samples
from foretrain.units import format_time

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from rich.table import Table


def candidates(choice: Recommendation) -> Table:
    """Every candidate, the fastest first: time, gain over DDP at its best, T/T*; then those skipped, and why."""
    from rich.table import Table
    from rich.text import Text

    compresses = any(one.compression for one in choice.candidates)
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    made.add_column("schedule", overflow="fold")
    for name in ("engine", *["sent as"] * compresses):
        made.add_column(name, overflow="fold")
    for name in ("iteration", "gain", "T/T*"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("", overflow="fold")
    skipped: dict[tuple[str, ...], list[str]] = {}
    for one in choice.candidates:
        where = [describe(one.place), *[one.compression or "it is"] * compresses]
        row = [str(one.schedule), *where]
        marks = ["chosen"] * (one is choice.chosen) + ["baseline"] * (one is choice.baseline)
        if one.time is None or one.gap is None:
            skipped.setdefault((*where, "–", "–", "–", one.why_not), []).append(one.schedule.name)
            continue
        numbers = [format_time(one.time), f"{choice.gain_of(one):+.1%}", f"{one.gap + 1:.3f}"]
        made.add_row(*map(Text, [*row, *numbers, ", ".join(marks)]), style="bold" if one is choice.chosen else "")
    for cells, names in skipped.items():
        made.add_row(*map(Text, [", ".join(names), *cells]), style="dim")
    return made


def what_ifs(found: WhatIfs) -> Table:
    """A row for each case."""
    from rich.table import Table
    from rich.text import Text

    unit = found.cases[0].workload.unit
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    made.add_column("what if", overflow="fold")
    for name in ("iteration", f"{unit}/s", "× now", "gain over DDP"):
        made.add_column(name, justify="right", no_wrap=True)
    for name in ("best schedule", "engine"):
        made.add_column(name, overflow="fold")
    for row in rows(found):
        made.add_row(*map(Text, row[:-1]), style="bold green" if row[-1] else "")
    return made


def rows(found: WhatIfs) -> list[tuple[str, ...]]:
    """The cells of each case, and last a mark where it helps most."""
    told = []
    for case in found.cases:
        choice, chosen = case.choice, case.choice.chosen
        sent = f", {chosen.compression}" if chosen.compression else ""
        told.append(
            (
                case.label,
                format_time(choice.time),
                format_rate_of_samples(case.throughput),
                f"{found.factor(case):.2f}×",
                "nothing to win" if choice.falls_back else f"{choice.gain:.1%} ± {choice.uncertainty:.1%}",
                str(chosen.schedule),
                f"{describe(chosen.place)}{sent}",
                "helps most" if case is found.most else "",
            )
        )
    return told


def page(found: WhatIfs, path: Path) -> None:
    """Writes one self-contained page with all cases."""
    now, most = found.cases[0], found.most
    unit = now.workload.unit
    cards = [
        Card("now", f"{format_rate_of_samples(now.throughput)} {unit}/s", format_time(now.choice.time)),
        Card("schedule now", now.choice.schedule.name, f"{now.choice.gain:.1%} over DDP at its best"),
        Card("optimum now", format_time(now.choice.chosen.optimum.time), "T*, which no schedule beats"),
    ]
    if most is not None:
        rate = f"{format_rate_of_samples(most.throughput)} {unit}/s"
        cards.append(Card("helps most", most.label, f"{found.factor(most):.2f}×: {rate}"))
    write_atomically(
        path,
        document(
            "planning.html",
            {"bars": bars(found)},
            title=f"{now.workload.name}: what if",
            unit=unit,
            good=most is not None,
            verdict=found.advice,
            reasons=" ".join(now.choice.lines).replace("auto: ", ""),
            cards=cards,
            rows=rows(found),
        ),
    )


def bars(found: WhatIfs) -> go.Figure:
    """Samples per second of each case."""
    names = [case.label for case in found.cases]
    figure = canvas(52 * len(names) + 110, hovermode="closest", showlegend=False)
    figure.add_bar(
        x=[case.throughput for case in found.cases],
        y=names,
        orientation="h",
        marker_color=[BLUE if case is found.most else GREY for case in found.cases],
        text=[f"{found.factor(case):.2f}×" for case in found.cases],
        customdata=[f"{case.choice.schedule}<br>{case.place}" for case in found.cases],
        hovertemplate="<b>%{y}</b><br>%{x:,.4g} a second<br>%{customdata}<extra></extra>",
    )
    figure.update_layout(margin={"l": 20, "r": 20, "t": 20, "b": 50})
    figure.update_xaxes(title_text=f"{found.cases[0].workload.unit} a second", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure
