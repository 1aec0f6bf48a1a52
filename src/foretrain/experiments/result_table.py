"""Table of a sweep's results and its Parquet file, the best schedules, and the Pareto front.

Rows stand in the order of the sweep file, one for each scenario.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from foretrain.errors import ConfigError, MissingExtra, unknown
from foretrain.experiments.evaluation import Scenario
from foretrain.experiments.result_store import ScenarioResult
from foretrain.experiments.sweep_file import Value, quantity
from foretrain.files import write_atomically
from foretrain.schedule import IDEAL, POLICIES, spec

if TYPE_CHECKING:
    import pyarrow

Kind: TypeAlias = Literal["text", "flag", "count", "number", "share", "rate", "size", "time"]
"""Content of a column: rates are bytes/s, sizes bytes, times seconds, a share 0.05 for 5 %."""
Row: TypeAlias = dict[str, Any]
"""A value for each column; None where a scenario has none."""


@dataclass(frozen=True, slots=True)
class Column:
    """Column: its name, kind and meaning."""

    name: str
    kind: Kind
    about: str


PARAMETERS = (
    Column("id", "text", "of the scenario: a hash of what is simulated"),
    Column("workload", "text", "the model's name, or the one in the recorded file"),
    Column("batch", "count", "samples per GPU"),
    Column("sequence", "count", "tokens per sample; null: the model's usual number"),
    Column("precision", "text", "of computation and gradients; null: the model's usual one"),
    Column("device", "text", "the GPU; null for a recorded workload"),
    Column("cluster", "text", "notation, placeholders filled in"),
    Column("policy", "text", "the schedule's name"),
    Column("asked", "text", "the schedule as the file asks for it"),
    Column("tuned", "flag", "whether free knobs were searched for their best"),
    Column("jitter", "share", "spread of the layer times"),
    Column("seed", "count", "of the jitter"),
)
"""Columns of the scenario; axes of clusters (``axis_NAME``) come after these."""
OUTCOMES = (
    Column("error", "text", "why it could not be simulated; null where it was"),
    Column("gpus", "count", "of the whole job"),
    Column("exchange", "text", "all_reduce, ps or ps_colocated; of a topology the collective"),
    Column("bandwidth", "rate", "what all hosts of a simple cluster send together; null for a topology"),
    Column("schedule", "text", "as it ran, with the knobs that were found"),
    Column("iteration_time", "time", "from one backward pass to the next"),
    Column("samples_per_second", "number", "of the whole job"),
    Column("optimum", "time", "T*, which no schedule beats"),
    Column("gap", "share", "T/T* − 1"),
    Column("kind", "text", "what binds T*: compute-, communication- or embedding-bound"),
    Column("layer", "text", "the layer that binds it"),
    Column("compute", "time", "Σb + Σf: the step if communication were free"),
    Column("communication", "time", "of the link, if it never idled"),
    Column("exposed", "time", "communication and updates that nothing hides"),
    Column("idle", "share", "of the iteration in which the GPU does nothing"),
    Column("operations", "number", "started in one step"),
    Column("baseline", "text", "the schedule that speed-ups are counted from, with its knobs"),
    Column("baseline_time", "time", "its iteration time"),
    Column("speedup", "number", "baseline_time / iteration_time"),
)
"""Columns of the result; knobs of schedules (``knob_NAME``, as they ran) come after these."""
_PARTS = ("id", "error", "knobs")
"""Of a result what is not an outcome as it stands."""


@dataclass(frozen=True, slots=True)
class Table:
    """Table of a sweep's results.

    Attributes:
        columns: parameters, axes, outcomes, knobs.
        rows: one for each scenario that has a result.
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    def column(self, name: str) -> Column:
        """Return the column called ``name``."""
        return next(column for column in self.columns if column.name == name)

    @property
    def failed(self) -> tuple[Row, ...]:
        """Return the rows that could not be simulated."""
        return tuple(row for row in self.rows if row["error"] is not None)

    @property
    def made(self) -> tuple[Row, ...]:
        """Return the rows that were simulated."""
        return tuple(row for row in self.rows if row["error"] is None)

    def write(self, path: Path) -> None:
        """Write a Parquet file, whole or not at all. MissingExtra without pyarrow."""
        arrow, parquet = _arrow()
        made = arrow.Table.from_pylist(list(self.rows), schema=self._schema(arrow))
        out = BytesIO()
        parquet.write_table(made, out, compression="zstd")
        write_atomically(path, out.getvalue())

    def _schema(self, arrow: Any) -> pyarrow.Schema:
        types = {"text": arrow.string(), "flag": arrow.bool_(), "count": arrow.int64()}
        return arrow.schema(
            [
                arrow.field(column.name, types.get(column.kind, arrow.float64()), metadata={"about": column.about})
                for column in self.columns
            ]
        )


def check_parquet() -> None:
    """Raise MissingExtra without pyarrow, before a long sweep rather than after it."""
    _arrow()


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise MissingExtra("pyarrow", "sweep", "a Parquet file") from error
    return pyarrow, parquet


def table(scenarios: Mapping[str, Scenario], results: Mapping[str, ScenarioResult]) -> Table:
    """Return the results of those of ``scenarios`` that have one."""
    pairs = [(one, results[known]) for known, one in scenarios.items() if known in results]
    axes = _axes([one for one, _ in pairs])
    knobs = _knobs([result for _, result in pairs])
    columns = (*PARAMETERS, *axes, *OUTCOMES, *knobs)
    rows = tuple(_parameters(one) | _axis_values(one, axes) | _outcomes(result, knobs) for one, result in pairs)
    return Table(columns, rows)


def _parameters(one: Scenario) -> Row:
    source = one.source
    return {
        "id": one.id,
        "workload": source.name,
        "batch": source.batch,
        "sequence": source.sequence,
        "precision": source.precision,
        "cluster": one.where.notation,
        "policy": spec(one.schedule).name,
        "asked": one.schedule,
        "tuned": one.tuned,
        "jitter": one.jitter,
        "seed": one.seed,
    }


def _axes(scenarios: Iterable[Scenario]) -> tuple[Column, ...]:
    """Return a column for each axis: a number where all its values are of one kind, otherwise text."""
    kinds: dict[str, set[Kind]] = {}
    for point in dict.fromkeys(one.where.axes for one in scenarios):
        for name, value in point:
            number = quantity(value)
            kinds.setdefault(name, set()).add(number.kind if number else "text")
    about = "axis of the clusters"
    return tuple(
        Column(f"axis_{name}", found.pop() if len(found) == 1 else "text", about) for name, found in kinds.items()
    )


def _axis_values(one: Scenario, axes: Iterable[Column]) -> Row:
    mine: dict[str, Value] = {f"axis_{name}": value for name, value in one.where.axes}
    row: Row = {}
    for column in axes:
        value = mine.get(column.name)
        if value is None or column.kind == "text":
            row[column.name] = None if value is None else str(value)
        else:
            number = quantity(value)
            assert number is not None
            row[column.name] = float(number.number)
    return row


def _knobs(results: Iterable[ScenarioResult]) -> tuple[Column, ...]:
    kinds: dict[str, Kind] = {}
    for result in results:
        if result.knobs.keys() - kinds.keys():
            for knob in (one for one in POLICIES[spec(result.schedule).name].knobs if one.kind != "sizes"):
                kinds.setdefault(knob.name, knob.kind if knob.kind in ("size", "time") else "number")
    return tuple(Column(f"knob_{name}", kind, "knob of schedules, as they ran") for name, kind in kinds.items())


def _outcomes(result: ScenarioResult, knobs: Iterable[Column]) -> Row:
    if result.error:
        names = [column.name for column in (*OUTCOMES, *knobs)]
        return {"device": None, **dict.fromkeys(names), "error": result.error}
    row: Row = {name: getattr(result, name) for name in ScenarioResult.__struct_fields__ if name not in _PARTS}
    row |= {"error": None, "device": result.device or None, "bandwidth": result.bandwidth or None}
    return row | {column.name: result.knobs.get(column.name.removeprefix("knob_")) for column in knobs}


_MORE_IS_BETTER = ("samples_per_second", "speedup")
"""Of all other columns less is."""
_COSTS = ("bandwidth", "gpus", "operations")
"""Costs to weigh throughput against unless a sweep names one: the first that varies."""
_KEY = ("workload", "batch", "sequence", "precision", "device", "cluster")
"""Columns of a scenario that a schedule cannot change."""


def over_seeds(table: Table) -> list[Row]:
    """Return a row for each scenario without its seed: numbers are medians over ``seeds`` seeds."""
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
    """Return the fastest schedule for each workload and cluster; the ideal only where there is no other."""
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
    """Pareto front: points that no other point beats in both objectives.

    Attributes:
        objectives: two columns; of `_MORE_IS_BETTER` more is better, of all others less.
        rows: by workload, each along the front, from the best in the second objective on.
    """

    objectives: tuple[str, str]
    rows: dict[str, tuple[Row, ...]]


def check_objectives(names: Sequence[str]) -> None:
    """Raise ConfigError for objectives that no result can have."""
    numbers = [column.name for column in (*PARAMETERS, *OUTCOMES) if column.kind not in ("text", "flag")]
    for name in names:
        if name not in numbers and not name.startswith(("axis_", "knob_")):
            raise unknown("objectives", name, numbers)
    if names and len(set(names)) != 2:
        problem = "is not two columns"
        raise ConfigError("objectives", list(names), problem, 'write e.g. ["samples_per_second", "gpus"]')


def front(rows: Sequence[Row], objectives: Sequence[str] = ()) -> ParetoFront:
    """Return the Pareto front of each workload. Raises ConfigError for objectives that the rows do not have."""
    varied = (name for name in _COSTS if len({row[name] for row in rows if row[name] is not None}) > 1)
    first, second = objectives or ("samples_per_second", next(varied, _COSTS[-1]))
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


def _undominated(rows: Iterable[Row], first: str, second: str) -> tuple[Row, ...]:
    """Return the rows that are better in ``first`` than all before them along ``second``."""
    found: list[Row] = []
    reached = math.inf
    for row in sorted(rows, key=lambda row: (_cost(row, second), _cost(row, first))):
        if (cost := _cost(row, first)) < reached:
            found.append(row)
            reached = cost
    return tuple(found)


def _cost(row: Row, name: str) -> float:
    return -row[name] if name in _MORE_IS_BETTER else row[name]
