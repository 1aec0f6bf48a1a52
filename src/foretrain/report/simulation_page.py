"""What a live simulation found, as one HTML page that needs no network."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from foretrain.device.model import PROVENANCES
from foretrain.files import write_atomically
from foretrain.report.document import Card, document
from foretrain.report.findings import SimulationFindings, share
from foretrain.report.palette import BLUE
from foretrain.report.simulation import BANNER, interval, percent, shown
from foretrain.report.simulation_figures import MOST_RANKS, accounts, memory, steps
from foretrain.report.simulation_timeline import timeline
from foretrain.units import format_size, format_time

if TYPE_CHECKING:
    import plotly.graph_objects as go

_PROVENANCE_COLOURS = (BLUE, "#7cb3f8", "#cbd5e1", "#dc2626")
_KINDS = {"kernel": "computing", "communication": "communication", "host": "host", "unseen": "not kept"}
_MOST_ROWS = 12


def page(found: SimulationFindings, path: str | os.PathLike[str]) -> None:
    """Writes the page to ``path``, whole or not at all. MissingExtra without plotly or Jinja2."""
    write_atomically(path, render(found))


def render(found: SimulationFindings) -> str:
    """The page as text; without activities it has no timeline and no critical path."""
    forecast, first = found.forecast, found.forecast.first
    return document(
        "simulation.html",
        _figures(found),
        good=not forecast.unknown and found.left > 0,
        verdict=f"{format_time(forecast.iteration_time)} an iteration on {forecast.world:,} × {forecast.device.name}",
        reasons=_reasons(found),
        cards=_cards(found),
        banner=BANNER,
        forecast=forecast,
        first=first,
        provenance=_provenance(found),
        operators=[(one.name, shown(one.time), percent(one.share), one.share) for one in found.operators[:_MOST_ROWS]],
        path=_path(found),
        loads=[
            (load.kind, format_size(load.carried), percent(load.mean), percent(load.busiest), load.name)
            for load in found.loads
            if load.carried
        ],
        more=len(forecast.ranks) - MOST_RANKS,
        usable=f"{found.done.usable / 2**30:.2f} GiB",
        warm=len(first.steps) - len(first.steady),
    )


def _figures(found: SimulationFindings) -> dict[str, go.Figure]:
    from foretrain.report.fabric_plot import fabric
    from foretrain.report.server_plot import inside
    from foretrain.report.topology_layout import Wires

    wires = Wires.of(found.done.network, found.utilisation)
    made = {
        "accounts": accounts(found),
        "timeline": timeline(found),
        "memory": memory(found),
        "steps": steps(found),
        "fabric": fabric(wires),
        "inside": inside(wires),
    }
    return {name: figure for name, figure in made.items() if figure is not None}


def _reasons(found: SimulationFindings) -> str:
    if found.path is None:
        return str(found.forecast.cluster)
    parts = sorted(
        ((kind, part) for kind, part in found.path.kinds().items() if part >= 5e-4), key=lambda item: -item[1]
    )
    told = ", ".join(f"{percent(part)} {_KINDS[kind]}" for kind, part in parts)
    return f"{found.forecast.cluster}. The critical path of a step is {told}."


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
        Card("iteration", format_time(forecast.iteration_time), f"{interval(found)} with 95 %"),
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


def _path(found: SimulationFindings) -> Sequence[tuple[str, str, float]]:
    """Name, share as text and as part of 1; what is left is summed."""
    if found.path is None:
        return []
    rows = list(found.path.shares().items())
    shown_rows = [(name, percent(part), part) for name, part in rows[:_MOST_ROWS]]
    rest = sum(part for _, part in rows[_MOST_ROWS:])
    return [*shown_rows, (f"{len(rows) - _MOST_ROWS} more", percent(rest), rest)] if rest else shown_rows
