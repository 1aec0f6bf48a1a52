"""What a sweep says: the best schedule of each workload on each cluster, and the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from foretrain.errors import ConfigError, unknown
from foretrain.experiments.result_table import OUTCOMES, PARAMETERS, Row, Table
from foretrain.schedule import IDEAL

_MORE_IS_BETTER = ("samples_per_second", "speedup")
"""Of all other columns less is."""
_COSTS = ("bandwidth", "gpus", "operations")
"""What throughput is weighed against unless a sweep says: the first that varies."""
_KEY = ("workload", "batch", "sequence", "precision", "device", "cluster")
"""What tells apart what cannot be chosen by scheduling."""


def over_seeds(table: Table) -> list[Row]:
    """A row for each scenario but for its seed: numbers are medians, ``seeds`` says of how many."""
    numbers = [column.name for column in table.columns if column.kind not in ("text", "flag", "count")]
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in table.made:
        groups.setdefault((*(row[name] for name in _KEY), row["asked"], row["tuned"], row["jitter"]), []).append(row)
    made = []
    for rows in groups.values():
        if len(rows) > 1:
            medians = {name: _median([row[name] for row in rows]) for name in numbers}
            made.append(rows[0] | medians | {"seeds": len(rows)})
        else:
            made.append(rows[0] | {"seeds": 1})
    return made


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return median(found) if found else None


def best(rows: Iterable[Row]) -> list[Row]:
    """For each workload and cluster the fastest schedule; the ideal only where there is no other."""
    groups: dict[tuple[object, ...], Row] = {}
    for row in rows:
        key = (*(row[name] for name in _KEY), row["jitter"])
        if key not in groups or _order(row) < _order(groups[key]):
            groups[key] = row
    return list(groups.values())


def _order(row: Row) -> tuple[bool, float]:
    return row["policy"] == IDEAL, row["iteration_time"]


@dataclass(frozen=True, slots=True)
class ParetoFront:
    """What cannot be made better in one objective without making it worse in the other.

    Attributes:
        objectives: two columns; of `_MORE_IS_BETTER` more is better, of all others less.
        rows: by workload, each along the front, from the best in the second objective on.
    """

    objectives: tuple[str, str]
    rows: dict[str, tuple[Row, ...]]


def check_objectives(names: Sequence[str]) -> None:
    """Raises ConfigError for what a front cannot be made of, as far as that is known before there are results."""
    numbers = [column.name for column in (*PARAMETERS, *OUTCOMES) if column.kind not in ("text", "flag")]
    for name in names:
        if name not in numbers and not name.startswith(("axis_", "knob_")):
            raise unknown("objectives", name, numbers)
    if names and len(set(names)) != 2:
        problem = "is not two columns"
        raise ConfigError("objectives", list(names), problem, 'write e.g. ["samples_per_second", "gpus"]')


def front(rows: Sequence[Row], objectives: Sequence[str] = ()) -> ParetoFront:
    """The Pareto front of each workload. Raises ConfigError for objectives that the rows do not have."""
    first, second = objectives or _usual(rows)
    for name in (first, second):
        if rows and name not in rows[0]:
            raise unknown("objectives", name, rows[0])
        if rows and any(isinstance(row[name], str) for row in rows):
            raise ConfigError("objectives", name, "is text", "name a column of numbers")
    have = [row for row in rows if row[first] is not None and row[second] is not None]
    useful = [row for row in have if row["policy"] != IDEAL] or have
    groups: dict[str, list[Row]] = {}
    for row in useful:
        groups.setdefault(row["workload"], []).append(row)
    return ParetoFront((first, second), {name: _undominated(group, first, second) for name, group in groups.items()})


def _usual(rows: Sequence[Row]) -> tuple[str, str]:
    for name in _COSTS:
        if len({row[name] for row in rows if row[name] is not None}) > 1:
            return "samples_per_second", name
    return "samples_per_second", _COSTS[-1]


def _undominated(rows: Iterable[Row], first: str, second: str) -> tuple[Row, ...]:
    """Along ``second``, each that is better in ``first`` than all before it."""
    found: list[Row] = []
    reached = math.inf
    for row in sorted(rows, key=lambda row: (_cost(row, second), _cost(row, first))):
        if (cost := _cost(row, first)) < reached:
            found.append(row)
            reached = cost
    return tuple(found)


def _cost(row: Row, name: str) -> float:
    return -row[name] if name in _MORE_IS_BETTER else row[name]
