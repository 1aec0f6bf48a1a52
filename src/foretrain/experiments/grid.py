"""grid: schedules × collectives × topologies on one workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretrain.errors import ConfigError
from foretrain.network import Cluster, Place, cluster
from foretrain.planner import Wanted, requested_schedule, resolved, said, tune
from foretrain.schedule import Spec
from foretrain.simulation import Run, simulate
from foretrain.units import Time, to_seconds
from foretrain.workload.step import Workload

if TYPE_CHECKING:
    from foretrain.network.deployment import Deployment


@dataclass(frozen=True, slots=True)
class Cell:
    """One topology with one collective, under every schedule.

    Attributes:
        topology: as it was written.
        collective: as it was asked for; empty for the simple cluster, which has one of its own.
        carried_by: the collective that all gradients together would take, which ``"auto"`` and ``"nccl"`` leave open.
        exchange: how long an all-reduce of all gradients at once takes alone, ps.
        runs: one per schedule, in the order asked for; empty where the collective does not suit.
        why_not: why it does not.
    """

    topology: str
    collective: str
    carried_by: str = ""
    exchange: Time = 0
    runs: tuple[Run, ...] = ()
    why_not: str = ""

    @property
    def best(self) -> Run:
        """The fastest run."""
        return min(self.runs, key=lambda run: run.iteration_time)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, times in seconds, for JSON."""
        return {
            "topology": self.topology,
            "collective": self.collective,
            "carried_by": self.carried_by,
            "exchange": to_seconds(self.exchange),
            "runs": [run.to_dict() for run in self.runs],
            "why_not": self.why_not,
        }


@dataclass(frozen=True, slots=True)
class Grid:
    """All cells, topology by topology.

    Attributes:
        workload: what is trained.
        schedules: as they were asked for.
        cells: topologies × collectives.
    """

    workload: Workload
    schedules: tuple[str, ...]
    cells: tuple[Cell, ...]

    @property
    def best(self) -> tuple[Cell, Run]:
        """Return the cell and the run with the fastest step."""
        cell = min((cell for cell in self.cells if cell.runs), key=lambda cell: cell.best.iteration_time)
        return cell, cell.best

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        return {
            "workload": self.workload.name,
            "schedules": list(self.schedules),
            "cells": [cell.to_dict() for cell in self.cells],
        }


def grid(
    workload: Workload,
    clusters: Sequence[str],
    collectives: Sequence[str] = ("auto",),
    schedules: Sequence[str | Wanted] = ("ddp", "bytescheduler"),
    *,
    tuned: bool = True,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    simulated: Callable[[Deployment], Deployment] = lambda place: place,
) -> Grid:
    """Simulates every schedule with every collective on every topology.

    Args:
        workload: one worker's step.
        clusters: topologies, or simple clusters, which take no part in the collectives.
        collectives: names, ``"auto"`` or ``"nccl"``; one that a topology cannot hold is left out there and says why.
        schedules: policies or their notation.
        tuned: whether free knobs are searched for their best in every cell.
        progress: told what comes next.
        simulated: gives each topology with its collective the fidelity that it is simulated with.

    Raises:
        ConfigError: something is empty or unknown, or nothing suits anything.
    """
    for name, given in (("clusters", clusters), ("collectives", collectives), ("schedules", schedules)):
        if not given:
            raise ConfigError(name, list(given), "is empty", "name at least one")
    plans = [requested_schedule(schedule) for schedule in schedules]
    places = [(text, cluster(text)) for text in clusters]
    todo = [(text, place, name) for text, place in places for name in _names(place, collectives)]
    cells = []
    for done, (text, place, name) in enumerate(todo):
        progress(f"{text} {name}".strip(), done, len(todo))
        cells.append(_cell(workload, text, place, name, plans, tuned, simulated))
    progress("done", len(todo), len(todo))
    if not any(cell.runs for cell in cells):
        raise ConfigError("collectives", list(collectives), f"suit no topology: {cells[0].why_not}", "try 'auto'")
    return Grid(workload, tuple(said(plan) for plan in plans), tuple(cells))


def _names(place: Place, collectives: Sequence[str]) -> Sequence[str]:
    return ("",) if isinstance(place, Cluster) else collectives


def _cell(
    workload: Workload,
    text: str,
    place: Place,
    name: str,
    plans: Sequence[Wanted],
    tuned: bool,
    simulated: Callable[[Deployment], Deployment],
) -> Cell:
    if isinstance(place, Cluster):
        carried, exchange = place.exchange, place.cost.time(workload.size)
    else:
        try:
            place = simulated(place.carried_by(name))
        except ConfigError as error:
            if error.problem == "is unknown":
                raise
            return Cell(text, name, why_not=f"{error.problem}; {error.remedy}")
        carried, exchange = place.collective_at(workload.size), place.duration("all_reduce", workload.size)
    runs = []
    for plan in plans:
        best = tune(workload, place, plan) if tuned and isinstance(plan, Spec) else resolved(plan, workload, place)
        runs.append(simulate(workload, place, best, trace=False))
    return Cell(text, name, carried, exchange, tuple(runs))
