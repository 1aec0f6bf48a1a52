"""Pictures of a live simulation that need no activities: where a step's time goes, memory, and step after step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretrain.live.forecast import RankForecast
from foretrain.report.findings import SimulationFindings, share
from foretrain.report.palette import BLUE, GREY, INK, LINE, ORANGE, SERIES, canvas
from foretrain.units import MILLISECOND, format_time

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST_RANKS = 32
"""Live ranks that are drawn."""
ACCOUNTS = {
    "compute": ("computing", BLUE),
    "exposed": ("communication exposed", ORANGE),
    "waiting": ("waiting for others", "#fdba74"),
    "idle": ("waiting for the host", "#cbd5e1"),
}
"""Of each time that a step divides into, what it is called and its colour."""
_MEMORY = {
    "parameters": BLUE,
    "gradients": "#7cb3f8",
    "optimizer": "#7c3aed",
    "activations": "#0d9488",
    "workspace": "#ca8a04",
    "other": "#94a3b8",
}
_CACHED = "#e2e8f0"


def accounts(found: SimulationFindings) -> go.Figure:
    """A stacked bar for each live rank: parts of its steady steps."""
    ranks = found.forecast.ranks[:MOST_RANKS]
    figure = _stacked(ranks)
    for name, (label, colour) in ACCOUNTS.items():
        figure.add_bar(
            y=_names(ranks),
            x=[100 * share(rank, name) for rank in ranks],
            customdata=[format_time(rank.mean(name)) if rank.mean(name) else "0" for rank in ranks],
            name=label,
            orientation="h",
            marker={"color": colour},
            hovertemplate=f"%{{y}}<br>{label}: %{{customdata}}, %{{x:.2f}} %<extra></extra>",
        )
    return figure.update_xaxes(title_text="part of a step (%)", range=[0, 100.5])


def memory(found: SimulationFindings) -> go.Figure:
    """A stacked bar for each live rank at its peak, and a line at what a GPU has."""
    ranks = found.forecast.ranks[:MOST_RANKS]
    figure = _stacked(ranks)
    kinds = [kind for kind in _MEMORY if any(rank.memory.breakdown.get(kind) for rank in ranks)]
    parts = {kind: [rank.memory.breakdown.get(kind, 0) for rank in ranks] for kind in kinds}
    parts["cached, not in use"] = [max(rank.memory.reserved - rank.memory.allocated, 0) for rank in ranks]
    for kind, sizes in parts.items():
        figure.add_bar(
            y=_names(ranks),
            x=[size / 2**30 for size in sizes],
            name=kind,
            orientation="h",
            marker={"color": _MEMORY.get(kind, _CACHED)},
            hovertemplate=f"%{{y}}<br>{kind}: %{{x:.2f}} GiB<extra></extra>",
        )
    usable = found.done.usable / 2**30
    figure.add_vline(x=usable, line={"color": "#b91c1c", "width": 2})
    place = {"x": usable, "y": 1, "yref": "paper", "yanchor": "bottom", "xanchor": "right", "showarrow": False}
    figure.add_annotation(text=f"{usable:.1f} GiB there are", font={"size": 12, "color": "#b91c1c"}, **place)
    most = max(usable, *(rank.memory.reserved / 2**30 for rank in ranks))
    return figure.update_xaxes(title_text="GiB at the peak", range=[0, most * 1.03])


def steps(found: SimulationFindings) -> go.Figure:
    """How long each step of each live rank took; the warm-up is where it is not steady."""
    ranks = found.forecast.ranks[:MOST_RANKS]
    figure = canvas(280, hovermode="closest", showlegend=1 < len(ranks) <= len(SERIES))
    for index, rank in enumerate(ranks):
        colour = BLUE if len(ranks) == 1 else SERIES[index % len(SERIES)]
        figure.add_scatter(
            x=[step.number for step in rank.steps],
            y=[(step.end - step.begin) / MILLISECOND for step in rank.steps],
            name=f"rank {rank.rank}",
            mode="lines+markers",
            line={"color": colour, "width": 1.5},
            hovertemplate=f"rank {rank.rank}, step %{{x}}: %{{y:.4~g}} ms<extra></extra>",
        )
    time = found.forecast.iteration_time / MILLISECOND
    figure.add_hline(y=time, line={"color": INK, "width": 1, "dash": "dot"})
    first = found.forecast.first
    warm = first.steps[len(first.steps) - len(first.steady)].number - 0.5
    if first.steps[0].number < warm:
        figure.add_vrect(
            x0=first.steps[0].number - 0.5, x1=warm, fillcolor=LINE, opacity=0.45, layer="below", line_width=0
        )
    figure.update_xaxes(title_text="step", gridcolor=LINE, dtick=max(1, len(first.steps) // 12))
    return figure.update_yaxes(title_text="ms", gridcolor=LINE, rangemode="tozero")


def _stacked(ranks: tuple[RankForecast, ...]) -> go.Figure:
    figure = canvas(
        34 * len(ranks) + 130,
        barmode="stack",
        bargap=0.25,
        legend={
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "yref": "container",
            "y": 1,
            "yanchor": "top",
            "traceorder": "normal",
        },
        margin={"l": 120, "r": 24, "t": 60, "b": 54},
    )
    figure.update_xaxes(gridcolor=LINE)
    return figure.update_yaxes(autorange="reversed", fixedrange=True, tickfont={"color": GREY})


def _names(ranks: tuple[RankForecast, ...]) -> list[str]:
    return [f"rank {rank.rank}" + (f" ×{rank.members:,}" if rank.members > 1 else "") for rank in ranks]
