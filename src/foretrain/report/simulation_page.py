"""Page of a live simulation: one self-contained HTML file, with time accounts, memory and steps as figures."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from statistics import fmean

from foretrain.device.model import PROVENANCES
from foretrain.files import write_atomically
from foretrain.live.forecast import RankForecast
from foretrain.live.imbalance import ImbalancePoint, drawn_loads
from foretrain.report.document import BLUE, INK, LINE, ORANGE, SERIES, Card, Figure, document
from foretrain.report.findings import SimulationFindings, share
from foretrain.report.simulation import BANNER, checkpoint, experts, interval, more_live, percent, shown
from foretrain.report.simulation_timeline import timeline
from foretrain.units import MILLISECOND, Time, format_size, format_time

_PROVENANCE_COLOURS = (BLUE, "#7cb3f8", "#cbd5e1", "#dc2626")
_KINDS = {"kernel": "computing", "communication": "communication", "host": "host", "unseen": "not kept"}
_MOST_ROWS = 12


def page(found: SimulationFindings, path: str | os.PathLike[str], command: str = "") -> None:
    """Write the page to ``path``, whole or not at all. MissingExtra without Jinja2."""
    write_atomically(path, render(found, command))


def render(found: SimulationFindings, command: str = "") -> str:
    """Return the page as text; without activities it has no timeline and no critical path."""
    forecast, first = found.forecast, found.forecast.first
    return document(
        "simulation.html",
        _figures(found),
        command=command,
        good=not forecast.unknown and found.left > 0,
        verdict=f"{format_time(forecast.iteration_time)} (95 %: {interval(found)}) an iteration "
        f"on {forecast.world:,} × {forecast.device.name}",
        reasons=_reasons(found),
        cards=_cards(found),
        experts="" if found.done.loads is None else experts(found.done.loads),
        failures=[point for point in found.curve if point.failure],
        banner=BANNER,
        forecast=forecast,
        more_live=more_live(found),
        first=first,
        provenance=_provenance(found),
        operators=_with_bars([(one.name, shown(one.time), one.share) for one in found.operators[:_MOST_ROWS]]),
        path=_with_bars(_path(found)),
        loads=[
            (load.kind, format_size(load.carried), percent(load.mean), percent(load.busiest), load.name)
            for load in found.loads
            if load.carried
        ],
        more=len(forecast.ranks) - MOST_RANKS,
        usable=f"{found.done.usable / 2**30:.2f} GiB",
        warm=first.steps.index(first.steady[0]),
        checkpoint=checkpoint(found),
    )


def _figures(found: SimulationFindings) -> dict[str, Figure]:
    from foretrain.report.fabric_plot import fabric, servers
    from foretrain.report.topology_layout import DrawnLinks

    wires = DrawnLinks.of(found.done.network, found.utilisation)
    made = {
        "accounts": accounts(found),
        "timeline": timeline(found),
        "memory": memory(found),
        "memory_timeline": memory_timeline([(name, rank.memory.timeline) for name, rank in _labelled(found)]),
        "steps": steps(found),
        "imbalance": imbalance(found),
        "fabric": fabric(wires),
        "inside": servers(wires),
    }
    return {name: figure for name, figure in made.items() if figure is not None}


def _reasons(found: SimulationFindings) -> str:
    if found.path is None:
        return ""
    parts = sorted(
        ((kind, part) for kind, part in found.path.kinds().items() if part >= 5e-4), key=lambda item: -item[1]
    )
    told = ", ".join(f"{percent(part)} {_KINDS[kind]}" for kind, part in parts)
    return f"The critical path of a step is {told}."


def _cards(found: SimulationFindings) -> list[Card]:
    forecast, rank, first = found.forecast, found.tightest, found.forecast.first
    rate = found.tokens_rate
    if rate is None:
        per_second = 1e12 / forecast.iteration_time
        throughput = Card("steps per second", f"{per_second:.3g}", "with --tokens also tokens per second")
    else:
        throughput = Card("tokens/s/GPU", f"{rate / forecast.world:,.0f}", f"{rate:,.0f} tokens/s on all GPUs")
    achieved = f"{forecast.flops / 1e12:.0f} TFLOP/s"
    mfu = forecast.mfu
    arithmetic = (
        Card("per GPU", achieved, "its peak is not known")
        if mfu is None
        else Card("MFU", percent(mfu), f"{achieved} per GPU, of the dense bf16 peak")
    )
    need = f"{rank.memory.reserved / 2**30:.1f} GiB"
    return [
        Card("iteration", format_time(forecast.iteration_time), f"95 %: {interval(found)}"),
        throughput,
        arithmetic,
        Card("peak memory", need, f"reserved on rank {rank.rank}; {found.left / 2**30:.1f} GiB are left"),
        Card(
            "exposed communication",
            percent(share(first, "exposed")),
            f"of rank {first.rank}'s step; bubble {percent(found.bubble)}, mean of all ranks",
        ),
    ]


def _provenance(found: SimulationFindings) -> Sequence[tuple[str, str, str, float]]:
    """Name, time, colour and part of 1."""
    times = found.forecast.first.times
    total = sum(times) or 1
    rows = zip(PROVENANCES, times, _PROVENANCE_COLOURS, strict=True)
    return [
        (name, f"{percent(time / total)}, {shown(time)}", colour, time / total) for name, time, colour in rows if time
    ]


def _with_bars(rows: Sequence[tuple[*tuple[str, ...], float]]) -> list[tuple[str | float, ...]]:
    """Return each row's texts, its share as text, and its bar as part of the longest."""
    most = max((part for *_, part in rows), default=0.0) or 1.0
    return [(*texts, percent(part), part / most) for *texts, part in rows]


def _path(found: SimulationFindings) -> Sequence[tuple[str, float]]:
    """Name and share of the critical path, as part of 1; what is left is summed."""
    if found.path is None:
        return []
    rows = list(found.path.shares().items())
    rest = sum(part for _, part in rows[_MOST_ROWS:])
    return [*rows[:_MOST_ROWS], *[(f"{len(rows) - _MOST_ROWS} more", rest)] * (rest > 0)]


MOST_RANKS = 32
"""Live ranks that are drawn."""
ACCOUNTS = {
    "compute": ("computing", BLUE),
    "exposed": ("communication exposed", ORANGE),
    "waiting": ("waiting for others", "#fdba74"),
    "idle": ("waiting for the host", "#cbd5e1"),
}
"""Of each time that a step divides into, what it is called and its colour."""
MEMORY = {
    "parameters": BLUE,
    "gradients": "#7cb3f8",
    "optimizer": "#7c3aed",
    "activations": "#0d9488",
    "workspace": "#ca8a04",
    "other": "#94a3b8",
}
_CACHED = "#e2e8f0"


def accounts(found: SimulationFindings) -> Figure:
    """A stacked bar for each live rank: parts of its steady steps."""
    ranks = found.forecast.ranks[:MOST_RANKS]
    figure = _stacked(ranks)
    for name, (label, colour) in ACCOUNTS.items():
        figure.add_bar(
            y=_names(ranks),
            x=[100 * share(rank, name) for rank in ranks],
            customdata=[format_time(rank.mean(name)) if rank.mean(name) else "0" for rank in ranks],
            name=label,
            marker={"color": colour},
            hovertemplate=f"%{{y}}<br>{label}: %{{customdata}}, %{{x:.2f}} %",
        )
    return figure.update_xaxes(title="part of a step (%)", range=[0, 100.5])


def memory(found: SimulationFindings) -> Figure:
    """A stacked bar for each live rank at its peak, and a line at what a GPU has."""
    ranks = found.forecast.ranks[:MOST_RANKS]
    figure = _stacked(ranks)
    kinds = [kind for kind in MEMORY if any(rank.memory.breakdown.get(kind) for rank in ranks)]
    parts = {kind: [rank.memory.breakdown.get(kind, 0) for rank in ranks] for kind in kinds}
    parts["cached, not in use"] = [max(rank.memory.reserved - rank.memory.allocated, 0) for rank in ranks]
    for kind, sizes in parts.items():
        figure.add_bar(
            y=_names(ranks),
            x=[size / 2**30 for size in sizes],
            name=kind,
            marker={"color": MEMORY.get(kind, _CACHED)},
            hovertemplate=f"%{{y}}<br>{kind}: %{{x:.2f}} GiB",
        )
    usable = found.done.usable / 2**30
    label = f"limit {usable:.1f} GiB"
    figure.add_line(x=usable, color="#b91c1c", width=2, label=label, side="right")
    most = max(usable, *(rank.memory.reserved / 2**30 for rank in ranks))
    return figure.update_xaxes(title="GiB at the peak", range=[0, most * 1.03])


def memory_timeline(ranks: Sequence[tuple[str, Sequence[tuple[Time, int]]]]) -> Figure | None:
    """Return a figure of allocated memory over the last step, one line for each rank's name; None without any."""
    figure = Figure(300, showlegend=1 < len(ranks) <= len(SERIES))
    for index, (name, samples) in enumerate(ranks):
        colour = BLUE if len(ranks) == 1 else SERIES[index % len(SERIES)]
        figure.add_scatter(
            x=[time / MILLISECOND for time, _ in samples],
            y=[size / 2**30 for _, size in samples],
            name=name,
            mode="lines",
            line={"shape": "hv", "color": colour, "width": 1.5},
            hovertemplate=f"{name}: %{{y:.4g}} GiB at %{{x:.4g}} ms",
        )
    figure.update_xaxes(title="time of the step's kernels until then (ms)")
    figure.update_yaxes(title="GiB allocated", rangemode="tozero")
    return figure if any(samples for _, samples in ranks) else None


def steps(found: SimulationFindings) -> Figure:
    """Return a figure of the time of each step of each live rank, warm-up included."""
    ranks = found.forecast.ranks[:MOST_RANKS]
    figure = Figure(280, showlegend=1 < len(ranks) <= len(SERIES))
    for index, rank in enumerate(ranks):
        colour = BLUE if len(ranks) == 1 else SERIES[index % len(SERIES)]
        figure.add_scatter(
            x=[step.number for step in rank.steps],
            y=[(step.end - step.begin) / MILLISECOND for step in rank.steps],
            name=f"rank {rank.rank}",
            mode="lines+markers",
            line={"color": colour, "width": 1.5},
            hovertemplate=f"rank {rank.rank}, step %{{x}}: %{{y:.4~g}} ms",
        )
    time = found.forecast.iteration_time / MILLISECOND
    figure.add_line(y=time, color=INK, width=1, dash="dot")
    first = found.forecast.first
    warm = first.steady[0].number - 0.5
    if first.steps[0].number < warm:
        figure.add_strip(first.steps[0].number - 0.5, warm, LINE, opacity=0.45)
    figure.update_xaxes(title="step")
    return figure.update_yaxes(title="ms", rangemode="tozero")


def imbalance(found: SimulationFindings) -> Figure | None:
    """Return a figure of the time of a step against the loads of experts; None where no other loads were simulated."""
    points = [point for point in found.curve if point.time is not None and point.busiest_expert is not None]
    if not points:
        return None
    figure = Figure(300, showlegend=True)
    add_draws(figure, points, "mean of the draws", "one draw", BLUE)
    loads = found.done.loads
    figure.add_scatter(
        x=[1.0 if loads is None else loads.busiest_expert],
        y=[found.forecast.iteration_time / MILLISECOND],
        name="this page" if loads is None else f"this page: {loads.given}",
        mode="markers",
        marker={"color": ORANGE, "size": 11},
        hovertemplate="this page<br>%{y:.4~g} ms, busiest expert %{x:.3~g} × the mean",
    )
    figure.update_xaxes(title="load of the busiest expert over the mean")
    return figure.update_yaxes(title="ms a step", rangemode="tozero")


def add_draws(
    figure: Figure, points: Sequence[ImbalancePoint], mean: str, draw: str, color: str, scale: float = 1.0
) -> None:
    """Add a curve of expert loads to ``figure``: every draw as a point, and a line through the means of each spread.

    Args:
        figure: whose axes are the busiest expert's load over the mean, and ms.
        points: those without a time are left out.
        mean, draw: names of the line and of the points.
        color: of both.
        scale: of times.
    """
    known = [
        (point, point.busiest_expert, point.time * scale / MILLISECOND)
        for point in points
        if point.time is not None and point.busiest_expert is not None
    ]
    sigmas = sorted({point.sigma for point, _, _ in known})
    alike = [[(load, time) for point, load, time in known if point.sigma == sigma] for sigma in sigmas]
    figure.add_scatter(
        x=[fmean(load for load, _ in group) for group in alike],
        y=[fmean(time for _, time in group) for group in alike],
        name=mean,
        mode="lines",
        line={"color": color, "width": 1.5},
        hovertemplate=f"{mean}<br>%{{y:.4~g}} ms, busiest expert %{{x:.3~g}} × the mean",
    )
    figure.add_scatter(
        x=[load for _, load, _ in known],
        y=[time for _, _, time in known],
        customdata=[drawn_loads(point.sigma, point.seed) for point, _, _ in known],
        name=draw,
        mode="markers",
        marker={"color": color, "size": 7},
        hovertemplate="%{customdata}<br>%{y:.4~g} ms, busiest expert %{x:.3~g} × the mean",
    )


def _stacked(ranks: tuple[RankForecast, ...]) -> Figure:
    figure = Figure(34 * len(ranks) + 70, barmode="stack")
    return figure.update_yaxes(autorange="reversed", fixedrange=True)


def _labelled(found: SimulationFindings) -> Iterator[tuple[str, RankForecast]]:
    ranks = found.forecast.ranks[:MOST_RANKS]
    return zip(_names(ranks), ranks, strict=True)


def _names(ranks: tuple[RankForecast, ...]) -> list[str]:
    return [f"rank {rank.rank}" + (f" ×{rank.members:,}" if rank.members > 1 else "") for rank in ranks]
