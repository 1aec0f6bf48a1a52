"""Analysis of what-ifs: faster links, more hosts, half the bytes, and other changes, one at a time.

Each case is a choice of its own (`foretrain.planner.choice`), so that every network has the schedule that suits it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from foretrain.errors import ConfigError, unknown
from foretrain.network import Cluster, Place, cluster
from foretrain.planner.candidate_search import COMPRESSIONS, describe, engines, halvable
from foretrain.planner.choice import Recommendation, choose, ratio_deviation
from foretrain.units import exact_rate, parse_rate, to_seconds
from foretrain.workload.step import Workload

CHANGES = ("rate", "hosts", "batch", "topology", "servers", "compression")
"""Keys of changes."""
NOW = "as it is"
"""The case without a change."""
_HELPS = 1.05
"""A change that brings less is none."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One change of job or cluster, with the schedule that is best then.

    Attributes:
        label: the change as it was asked for, or `NOW`.
        workload: one worker's step then.
        place: where.
        choice: the best schedule then.
    """

    label: str
    workload: Workload
    place: Place
    choice: Recommendation

    @property
    def throughput(self) -> float:
        """Return samples per second of the whole cluster."""
        return self.workload.batch * self.place.total_gpus / to_seconds(self.choice.time)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, times in seconds, for JSON."""
        chosen = self.choice.chosen
        return {
            "case": self.label,
            "cluster": str(self.place),
            "batch": self.workload.batch,
            "iteration_time": to_seconds(self.choice.time),
            "samples_per_second": self.throughput,
            "schedule": str(chosen.schedule),
            "engine": describe(chosen.place),
            "compression": chosen.compression,
            "gain": self.choice.gain,
            "uncertainty": self.choice.uncertainty,
            "optimum": to_seconds(chosen.optimum.time),
        }


@dataclass(frozen=True, slots=True)
class WhatIfs:
    """Changes of job or cluster, of which the first is `NOW`: none."""

    cases: tuple[WhatIf, ...]

    def factor(self, case: WhatIf) -> float:
        """Return the samples per second relative to the case without a change."""
        return case.throughput / self.cases[0].throughput

    def deviation(self, case: WhatIf) -> float:
        """Return one standard deviation of `factor`: how far forecasts were off in the lab."""
        return self.factor(case) * ratio_deviation(self.cases[0].place, case.place)

    @property
    def most(self) -> WhatIf | None:
        """Return the change that helps most; None where none brings 5 %."""
        best = max(self.cases, key=lambda case: case.throughput)
        return best if self.factor(best) >= _HELPS else None

    @property
    def advice(self) -> str:
        """Return the main finding as a sentence."""
        if len(self.cases) == 1:
            return "Nothing was changed."
        if (most := self.most) is None:
            return "No single change of these would bring 5 % more samples a second."
        return f"{most.label} helps most: {self.factor(most):.2f} ± {self.deviation(most):.2f}× the samples a second."

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, for JSON."""
        most = self.most
        rows = [
            case.to_dict() | {"factor": self.factor(case), "factor_deviation": self.deviation(case)}
            for case in self.cases
        ]
        return {"cases": rows, "helps_most": most and most.label}


def usual(workload: Workload, place: Place) -> tuple[str, ...]:
    """Return the default changes: twice the rate, the hosts and the batch, and half the bytes."""
    found = [f"batch={2 * workload.batch}"]
    if isinstance(place, Cluster):
        found = [f"rate={exact_rate(2 * place.up)}", f"hosts={2 * place.workers}", *found]
    if halvable(workload):
        found.append(f"compression={COMPRESSIONS[0]}")
    return tuple(found)


def what_if(
    workload: Workload,
    place: Place,
    changes: Sequence[str],
    *,
    rebatched: Callable[[int], Workload] | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> WhatIfs:
    """Return the best schedule without a change, and after each of ``changes`` alone.

    Args:
        workload: one worker's step.
        place: where.
        changes: e.g. ``"rate=25Gbps"``, ``"hosts=8"``, ``"batch=128"``, ``"topology=bigraph:8x4@25Gbps"``,
            ``"servers=2"``, ``"compression=fp16"``.
        rebatched: the workload with another batch; by default all computation in proportion to it.
        progress: told what comes next.

    Raises:
        ConfigError: a change does not read, or does not suit the cluster.
    """
    todo: list[tuple[str, Workload, Place, tuple[str, ...]]] = [(NOW, workload, place, ())]
    for text in dict.fromkeys(changes):
        try:
            todo.append((text, *_changed(text, workload, place, rebatched or (lambda batch: scaled(workload, batch)))))
        except ConfigError as error:
            raise error.at("what-if") from None
    cases = []
    for done, (label, work, where, allow) in enumerate(todo):
        progress(label, done, len(todo))
        cases.append(WhatIf(label, work, where, choose(work, engines(where), allow=allow)))
    progress("done", len(todo), len(todo))
    return WhatIfs(tuple(cases))


def scaled(workload: Workload, batch: int) -> Workload:
    """Return ``workload`` with another batch: passes in proportion, updates unchanged."""
    slower = workload.slowed(batch / workload.batch)
    layers = tuple(
        dataclasses.replace(new, update=old.update) for new, old in zip(slower.layers, workload.layers, strict=True)
    )
    return dataclasses.replace(slower, layers=layers, batch=batch)


def _changed(
    text: str, workload: Workload, place: Place, rebatched: Callable[[int], Workload]
) -> tuple[Workload, Place, tuple[str, ...]]:
    """Return workload, place and allowed compressions after one change."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not value:
        raise ConfigError(key, value, "has no value", "write e.g. 'rate=25Gbps'")
    if key == "rate":
        rate = parse_rate(value, key)
        return workload, place.scaled(rate / place.up) if isinstance(place, Cluster) else place.changed(key, rate), ()
    if key == "hosts":
        hosts = _count(key, value)
        if isinstance(place, Cluster):
            return workload, dataclasses.replace(place, workers=hosts), ()
        return workload, place.changed("workers", hosts), ()
    if key == "batch":
        return rebatched(_count(key, value)), place, ()
    if key == "topology":
        return workload, dataclasses.replace(cluster(value), device=place.device), ()
    if key == "servers":
        if not isinstance(place, Cluster):
            raise ConfigError(key, value, "have no place on a topology", "give a simple cluster")
        return workload, dataclasses.replace(place, exchange="ps", servers=_count(key, value)), ()
    if key == "compression":
        if value not in COMPRESSIONS:
            raise unknown(key, value, COMPRESSIONS)
        return workload, place, (value,)
    raise unknown("change", key, CHANGES)


def _count(key: str, value: str) -> int:
    if not re.fullmatch(r"0*[1-9][0-9]{0,5}", value):
        raise ConfigError(key, value, "is not a whole number from 1 to 999999", f"write e.g. '{key}=8'")
    return int(value)
