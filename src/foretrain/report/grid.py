"""A grid of schedules × collectives × topologies: a table, and a page with its heat map."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from foretrain.experiments.grid import Grid
from foretrain.files import write_atomically
from foretrain.planner.choice import usual
from foretrain.report.document import Card, Figure, document
from foretrain.units import MILLISECOND, format_time

if TYPE_CHECKING:
    from rich.table import Table


def table(grid: Grid) -> Table:
    """A row for each topology and collective, a column for each schedule; the best of each row is bold."""
    from rich.table import Table

    left_out = {f"{cell.collective} {cell.why_not}": None for cell in grid.cells if not cell.runs}
    made = Table(box=None, pad_edge=False, title=_title(grid), title_justify="left", caption_justify="left")
    made.caption = "\n".join(["one: all gradients in a single all-reduce, alone", *left_out])
    for name in ("topology", "collective"):
        made.add_column(name, overflow="fold")
    for name in ("one", *grid.schedules, "T*"):
        made.add_column(name, justify="right", no_wrap=True)
    before = ""
    for cell in grid.cells:
        topology, before = "" if cell.topology == before else cell.topology, cell.topology
        if not cell.runs:
            made.add_row(topology, cell.collective, "–")
            continue
        name = cell.collective or cell.carried_by
        chosen = f" ({cell.carried_by})" if name not in cell.carried_by else ""
        times = [
            f"[bold]{format_time(run.iteration_time)}[/bold]" if run is cell.best else format_time(run.iteration_time)
            for run in cell.runs
        ]
        made.add_row(topology, name + chosen, format_time(cell.exchange), *times, format_time(cell.best.bound.time))
    return made


def verdict(grid: Grid) -> str:
    """Return the main finding as a sentence."""
    cell, run = grid.best
    time = f"{format_time(run.iteration_time)} ± {usual(run.cluster).forecast:.1%}"
    return f"{cell.topology} with {cell.carried_by} under {run.schedule.name} is the fastest: {time} an iteration"


def page(grid: Grid, path: Path, command: str = "") -> None:
    """Write one self-contained page with the heat map."""
    cell, run = grid.best
    error = usual(run.cluster).forecast
    cards = [
        Card("fastest iteration", f"{format_time(run.iteration_time)} ± {error:.1%}", f"{run.gap:.1%} above T* there"),
        Card("topology", cell.topology, f"{run.cluster.total_gpus} GPUs"),
        Card("collective", cell.carried_by, f"all gradients at once in {format_time(cell.exchange)}"),
        Card("schedule", run.schedule.name, f"{run.throughput:,.0f} {grid.workload.unit}/s"),
    ]
    reasons = "Every cell is one simulation of the steady state; knobs are tuned in each where they are free."
    write_atomically(
        path,
        document(
            "grid.html",
            {"heat": heat(grid)},
            title=_title(grid),
            command=command,
            good=True,
            verdict=verdict(grid),
            reasons=reasons,
            cards=cards,
        ),
    )


def heat(grid: Grid) -> Figure:
    """Iteration time in ms, coloured by how far it is from the fastest of all."""
    cells = [cell for cell in grid.cells if cell.runs]
    names = [f"{cell.collective or cell.carried_by} · {cell.topology}" for cell in cells]
    times = [[run.iteration_time / MILLISECOND for run in cell.runs] for cell in cells]
    figure = Figure(44 * len(cells) + 150)
    figure.add_heatmap(
        z=times,
        x=list(grid.schedules),
        y=names,
        text=[[format_time(run.iteration_time) for run in cell.runs] for cell in cells],
        customdata=[[f"T/T* {1 + run.gap:.3f}<br>{run.cluster}" for run in cell.runs] for cell in cells],
        hovertemplate="<b>%{y}</b><br>%{x}: %{text}<br>%{customdata}",
    )
    figure.update_yaxes(autorange="reversed")
    return figure


def _title(grid: Grid) -> str:
    return f"{grid.workload.name}: schedules × collectives × topologies"
