"""Report of a loss tolerance: a table for a terminal, and a page with accuracy over p and over rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Group
from rich.table import Table
from rich.text import Text

from foretrain.files import write_atomically
from foretrain.loss_tolerance.tolerance import Level, Profile
from foretrain.report.document import BLUE, INK, ORANGE, SERIES, Card, Figure, document


@dataclass(frozen=True, slots=True)
class ToleranceRow:
    """Line of the table as text.

    Attributes:
        p: share of each rank's contribution that sums may lose.
        lost: share of the bytes sent, hop by hop, that was lost.
        accuracy: mean and standard deviation over seeds, at equal rounds.
        difference: to p = 0 of the same seeds, mean and interval.
        verdict: whether it is shown to be no worse.
        rounds: what the trainings took to be as accurate, as a multiple of p = 0; how many did.
    """

    p: str
    lost: str
    accuracy: str
    difference: str
    verdict: str
    rounds: str


def rows(found: Profile) -> list[ToleranceRow]:
    """Return a row for every p."""
    return [_row(found, level) for level in found.levels]


def _row(found: Profile, level: Level) -> ToleranceRow:
    one, seeds = level.difference, found.settings.seeds
    caught = seeds - level.reached.count(None)
    rounds = f"{level.slower:.2f}×" if caught == seeds else f"{caught} of {seeds}"
    if math.isnan(level.mean):
        return ToleranceRow(_percent(level.p), _percent(level.lost), "diverged", "", "no", rounds)
    accuracy = f"{level.mean:.4f} ± {level.deviation:.4f}"
    if level.p == 0:
        return ToleranceRow(_percent(0), _percent(level.lost), accuracy, "", "", rounds)
    difference = f"{one.mean:+.4f} [{one.low:+.4f}, {one.high:+.4f}]"
    verdict = "yes" if level.not_worse else "no"
    return ToleranceRow(_percent(level.p), _percent(level.lost), accuracy, difference, verdict, rounds)


def _percent(p: float) -> str:
    return f"{100 * p:.3g} %"


def verdict(found: Profile) -> str:
    """Return the main finding as a sentence."""
    equal, longer = found.tolerable, found.with_more_rounds
    if equal == 0 and longer == 0:
        return "No loss is shown to be tolerable"
    parts = [f"Tolerates a loss of {_percent(equal)} at equal rounds" if equal else "None at equal rounds"]
    if longer > equal:
        parts.append(f"{_percent(longer)} with up to {found.settings.more:g} times the rounds")
    return "; ".join(parts)


def usage(found: Profile) -> str:
    """Return the command that trains with what is tolerable; nothing where no transport loses as was measured."""
    way, p = found.settings.exchange, f"{100 * found.tolerable:g}%"
    if not found.tolerable or way.small == "lossy":
        return ""
    over = "ps" if way.way == "parameter_server" else way.way
    if way.back == "reliable":
        chosen = "" if over == "transpose" else f" --over {over}"
        return f"foretrain run --tolerance {p}{chosen} -- train.py"
    return f"foretrain run --transport 'bounded(tolerance={p}, over=ps, updates=servers)' -- train.py" * (over == "ps")


def reasons(found: Profile) -> str:
    """Return settings and test of the profile as a sentence."""
    one = found.settings
    level = 100 * (1 - 2 * one.alpha)
    return (
        f"{one.seeds} seeds, {one.rounds} rounds, {_exchange(found)}. Not worse: the {level:g} % interval of paired "
        f"differences to p = 0 is above −{one.margin:g} (one-sided t test at {one.alpha:g}), and so are all smaller p"
    )


def _exchange(found: Profile) -> str:
    way = found.settings.exchange
    kinds = {"packet": "any packet", "layer": "front layers first", "magnitude": "small magnitudes first"}
    losing = kinds[way.tagging.by]
    name = way.way.replace("_", " ")
    held = ", partial sums held" if way.gap == "held" and way.back == "lossy" and way.way != "parameter_server" else ""
    return f"{way.ranks} workers, {name}, {way.back} way back{held}, {way.small} small tensors, losing {losing}"


def summary(found: Profile) -> Group:
    """Return the table and the findings for ``rich.print``."""
    verdict_line = Text(f"{verdict(found)}.", style="bold green" if found.tolerable else "bold yellow")
    command = [Text(f"Use it: {usage(found)}")] if usage(found) else []
    return Group(table(found), Text(""), verdict_line, *command, Text(f"{reasons(found)}.", style="dim"))


def table(found: Profile) -> Table:
    """A row for every p."""
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("p", "lost", "accuracy", "difference", "rounds"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("not worse", no_wrap=True)
    for level, row in zip(found.levels, rows(found), strict=True):
        style = "bold green" if level.p == found.tolerable and level.p else ""
        made.add_row(row.p, row.lost, row.accuracy, row.difference, row.rounds, row.verdict, style=style)
    return made


# The page.


def page(found: Profile, path: Path, command: str = "") -> None:
    """Write one self-contained page. MissingExtra without Jinja2."""
    first = found.levels[0]
    cards = [
        Card("At equal rounds", _percent(found.tolerable), "of gradients lost, shown to be no worse"),
        Card("With more rounds", _percent(found.with_more_rounds), f"up to {found.settings.more:g} times as many"),
        Card("Without losses", f"{first.mean:.4f}", f"± {first.deviation:.4f} over {found.settings.seeds} seeds"),
        Card("Margin", f"{found.settings.margin:g}", "the difference that does not matter"),
    ]
    figures = {"grid": over_p(found), "curves": over_rounds(found)}
    good = found.tolerable > 0
    write_atomically(
        path,
        document(
            "tolerance.html",
            figures,
            command=command,
            good=good,
            verdict=verdict(found),
            reasons=reasons(found) + ".",
            cards=cards,
            rows=rows(found),
            exchange=_exchange(found),
            usage=usage(found),
            share=_percent(found.tolerable),
        ),
    )


def over_p(found: Profile) -> Figure:
    """Differences to p = 0 with their intervals over p, and the margin. Equally spaced, for p = 0 has no logarithm."""
    levels = [level for level in found.levels[1:] if math.isfinite(level.difference.mean)]
    figure = Figure(380)
    figure.add_scatter(
        x=[_percent(level.p) for level in levels],
        y=[level.difference.mean for level in levels],
        error_y=[level.difference.high - level.difference.mean for level in levels],
        mode="markers",
        marker={"size": 9, "color": [BLUE if level.not_worse else ORANGE for level in levels]},
        customdata=[f"{level.mean:.4f} ± {level.deviation:.4f}" for level in levels],
        hovertemplate="<b>%{x}</b><br>%{y:+.4f}; accuracy %{customdata}",
        showlegend=False,
    )
    figure.add_line(y=-found.settings.margin, color=INK, dash="dot")
    figure.update_xaxes(title="p, the share that sums may lose", type="category")
    figure.update_yaxes(title="difference in accuracy")
    return figure


def over_rounds(found: Profile) -> Figure:
    """Accuracy over rounds at every p, mean over the seeds that were evaluated then."""
    figure = Figure(440)
    colors = (INK, *SERIES)
    for index, level in enumerate(found.levels):
        shared = sorted(set.intersection(*(set(curve.rounds) for curve in level.curves)))
        means = [fmean(curve.at(number) for curve in level.curves) for number in shared]
        figure.add_scatter(
            x=shared,
            y=[None if math.isnan(mean) else mean for mean in means],
            name=_percent(level.p),
            mode="lines",
            line={"color": colors[index % len(colors)], "width": 2.5 if index == 0 else 1.6},
            hovertemplate=f"<b>{_percent(level.p)}</b><br>%{{x}} rounds: %{{y:.4f}}",
        )
    figure.update_xaxes(title="rounds")
    figure.update_yaxes(title="accuracy")
    return figure
