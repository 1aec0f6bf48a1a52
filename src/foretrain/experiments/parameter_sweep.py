"""sweep: how each schedule and the optimum change along one parameter of the cluster."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from foretrain.errors import ConfigError, unknown
from foretrain.network import Cluster, Place, cluster
from foretrain.planner import Wanted, requested_schedule, resolved, said, tune
from foretrain.schedule import Spec
from foretrain.simulation import simulate
from foretrain.simulation.simulation import bound
from foretrain.units import Time, exact_time, format_rate, parse_rate, parse_time, to_seconds
from foretrain.workload.step import Workload

PARAMETERS = ("rate", "latency", "overhead", "workers")


@dataclass(frozen=True, slots=True)
class ParameterSweep:
    """Iteration times over one parameter.

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
        """One value for a person."""
        if self.parameter == "rate":
            return format_rate(value)
        return str(int(value)) if self.parameter == "workers" else exact_time(int(value))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, times in seconds."""
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
    schedules: str | Sequence[str | Wanted],
    along: str,
    *,
    points: int = 9,
    tuned: bool = True,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> ParameterSweep:
    """Simulates every schedule at ``points`` geometric steps ``along``, e.g. ``"rate=1Gbps:100Gbps"``.

    ``tuned`` searches the free knobs at every point, starting over each time.
    """
    place = cluster(where)
    parameter, values = _range(along, points)
    plans = {
        said(plan): plan for plan in map(requested_schedule, [schedules] if isinstance(schedules, str) else schedules)
    }
    if not plans:
        raise ConfigError("schedules", schedules, "is empty", "name at least one")
    times: dict[str, list[Time]] = {name: [] for name in plans}
    optimum = []
    for done, value in enumerate(values):
        progress(f"{parameter} {done + 1}/{len(values)}", done, len(values))
        at = _changed(place, parameter, value)
        optimum.append(bound(workload, at).time)
        for name, plan in plans.items():
            if tuned and isinstance(plan, Spec):
                best = tune(workload, at, plan, evaluations=24)
            else:
                best = resolved(plan, workload, at)
            times[name].append(simulate(workload, at, best, trace=False).iteration_time)
    progress("done", len(values), len(values))
    rows = {name: tuple(column) for name, column in times.items()}
    return ParameterSweep(parameter, values, tuple(optimum), workload.compute, rows)


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
