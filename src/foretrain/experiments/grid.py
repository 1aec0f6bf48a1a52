"""Expansions of one comparison: over one parameter of the cluster, and over topologies × collectives."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretrain.errors import ConfigError, unknown
from foretrain.experiments.evaluation import simulate_all
from foretrain.network import Cluster, Place, cluster
from foretrain.planner import ScheduleRequest, request_text, requested_schedule
from foretrain.simulation import Run
from foretrain.units import Time, exact_time, format_rate, parse_rate, parse_time, to_seconds
from foretrain.workload.step import Workload

if TYPE_CHECKING:
    from foretrain.network.deployment import Deployment

PARAMETERS = ("rate", "latency", "overhead", "workers")


@dataclass(frozen=True, slots=True)
class ParameterSweep:
    """Iteration times over one parameter of the cluster.

    Attributes:
        parameter: one of `PARAMETERS`.
        values: in its inside unit: bytes/s, ps or hosts.
        optimum: T* at each value.
        compute: Σb + Σf.
        times: per schedule as written, the iteration time at each value.
    """

    parameter: str
    values: tuple[float, ...]
    optimum: tuple[Time, ...]
    compute: Time
    times: dict[str, tuple[Time, ...]]

    def label(self, value: float) -> str:
        """Return ``value`` with its unit."""
        if self.parameter == "rate":
            return format_rate(value)
        return str(int(value)) if self.parameter == "workers" else exact_time(int(value))

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, times in seconds."""
        return {
            "parameter": self.parameter,
            "values": list(self.values),
            "labels": [self.label(value) for value in self.values],
            "optimum": [to_seconds(t) for t in self.optimum],
            "times": {name: [to_seconds(t) for t in times] for name, times in self.times.items()},
        }


def sweep(
    workload: Workload,
    where: str | Place,
    schedules: str | Sequence[str | ScheduleRequest],
    along: str,
    *,
    points: int = 9,
    tuned: bool = True,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> ParameterSweep:
    """Simulate every schedule at ``points`` geometric steps ``along``, e.g. ``"rate=1Gbps:100Gbps"``.

    ``tuned`` searches the free knobs at every point, starting over each time.
    """
    place = cluster(where)
    parameter, values = _range(along, points)
    requests = map(requested_schedule, [schedules] if isinstance(schedules, str) else schedules)
    plans = {request_text(plan): plan for plan in requests}
    if not plans:
        raise ConfigError("schedules", schedules, "is empty", "name at least one")
    places = [
        (f"{parameter} {number}/{len(values)}", _changed(place, parameter, value))
        for number, value in enumerate(values, 1)
    ]
    runs = simulate_all(workload, places, list(plans.values()), tuned=tuned, evaluations=24, progress=progress)
    optimum = tuple(row[0].bound.time for row in runs)
    times = {name: tuple(row[index].iteration_time for row in runs) for index, name in enumerate(plans)}
    return ParameterSweep(parameter, values, optimum, workload.compute, times)


def _range(along: str, points: int) -> tuple[str, tuple[float, ...]]:
    if not isinstance(points, int) or points < 2:
        raise ConfigError("points", points, "is not a number of points of a curve", "take at least 2")
    parameter, _, span = str(along).partition("=")
    low_text, colon, high_text = span.partition(":")
    if parameter not in PARAMETERS:
        raise unknown("sweep", parameter, PARAMETERS)
    if not colon:
        raise ConfigError("sweep", along, "has no range", "write e.g. 'rate=1Gbps:100Gbps'")
    parse: dict[str, Callable[[str, str], float]] = {"rate": parse_rate, "workers": _count}
    low, high = (parse.get(parameter, parse_time)(text.strip(), f"sweep {parameter}") for text in (low_text, high_text))
    if not 0 < low < high:
        raise ConfigError("sweep", along, "is not an ascending range above zero", "write e.g. 'rate=1Gbps:100Gbps'")
    raw = [low * math.exp(math.log(high / low) * k / (points - 1)) for k in range(points)]
    if parameter == "rate":
        return parameter, (low, *raw[1:-1], high)
    return parameter, tuple(sorted({round(value) for value in raw}))


def _count(text: str, field: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ConfigError(field, text, "is not a whole number", "write e.g. 'workers=2:64'")
    return int(text)


def _changed(place: Place, parameter: str, value: float) -> Place:
    if not isinstance(place, Cluster):
        return place.changed(parameter, value)
    if parameter == "rate":
        ratio = place.down / place.up
        return dataclasses.replace(place, up=value, down=value * ratio)
    return dataclasses.replace(place, **{parameter: int(value)})


@dataclass(frozen=True, slots=True)
class Cell:
    """Runs of every schedule on a topology with a collective.

    Attributes:
        topology: in the notation that was given.
        collective: as requested; empty for a simple cluster, which has one of its own.
        carried_by: the collective of all gradients together, which ``"auto"`` and ``"nccl"`` leave open.
        exchange: duration of one all-reduce of all gradients without contention, ps.
        runs: one per schedule, in the order requested; empty where the collective does not suit the topology.
        why_not: why it does not suit.
    """

    topology: str
    collective: str
    carried_by: str = ""
    exchange: Time = 0
    runs: tuple[Run, ...] = ()
    why_not: str = ""

    @property
    def best(self) -> Run:
        """Return the fastest run."""
        return min(self.runs, key=lambda run: run.iteration_time)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, times in seconds, for JSON."""
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
    """Cells of every topology and collective, topology by topology.

    Attributes:
        workload: the training step of all cells.
        schedules: as requested.
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
        """Return plain numbers, for JSON."""
        return {
            "workload": self.workload.name,
            "schedules": list(self.schedules),
            "cells": [cell.to_dict() for cell in self.cells],
        }


def grid(
    workload: Workload,
    clusters: Sequence[str],
    collectives: Sequence[str] = ("auto",),
    schedules: Sequence[str | ScheduleRequest] = ("ddp", "bytescheduler"),
    *,
    tuned: bool = True,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    simulated: Callable[[Deployment], Deployment] = lambda place: place,
) -> Grid:
    """Simulate every schedule with every collective on every topology.

    Args:
        workload: one worker's step.
        clusters: topologies, or simple clusters, which take no part in the collectives.
        collectives: names, ``"auto"`` or ``"nccl"``; one that does not suit a topology is left out, with a reason.
        schedules: policies or their notation.
        tuned: whether free knobs are searched for their best in every cell.
        progress: called with the next cell, the number done and the total.
        simulated: gives each topology with its collective the fidelity that it is simulated with.

    Raises:
        ConfigError: an argument is empty or unknown, or no collective suits any topology.
    """
    for name, given in (("clusters", clusters), ("collectives", collectives), ("schedules", schedules)):
        if not given:
            raise ConfigError(name, list(given), "is empty", "name at least one")
    plans = [requested_schedule(schedule) for schedule in schedules]
    cells = [found for text in clusters for found in _cells(workload, text, collectives, simulated)]
    places = [(f"{cell.topology} {cell.collective}".strip(), place) for cell, place in cells if place is not None]
    if not places:
        raise ConfigError("collectives", list(collectives), f"suit no topology: {cells[0][0].why_not}", "try 'auto'")
    runs = iter(simulate_all(workload, places, plans, tuned=tuned, progress=progress))
    done = (cell if place is None else dataclasses.replace(cell, runs=next(runs)) for cell, place in cells)
    return Grid(workload, tuple(request_text(plan) for plan in plans), tuple(done))


def _cells(
    workload: Workload, text: str, collectives: Sequence[str], simulated: Callable[[Deployment], Deployment]
) -> Iterator[tuple[Cell, Place | None]]:
    """Yield the cells of one topology without runs, each with its place; None where the collective does not suit."""
    place = cluster(text)
    if isinstance(place, Cluster):
        yield Cell(text, "", place.exchange, place.cost.time(workload.size)), place
        return
    for name in collectives:
        try:
            there = simulated(place.carried_by(name))
        except ConfigError as error:
            if error.problem == "is unknown":
                raise
            yield Cell(text, name, why_not=f"{error.problem}; {error.remedy}"), None
        else:
            exchange = there.duration("all_reduce", workload.size)
            yield Cell(text, name, there.collective_at(workload.size), exchange), there
