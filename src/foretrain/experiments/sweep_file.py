"""The TOML file of a sweep: which workloads, clusters, schedules, knobs and seeds.

    seeds = 3                                            # or a list of them
    jitter = 0.03                                        # what they vary; see `foretrain.workload.step`
    exclude = ["schedule = p3 and rate >= 50Gbps"]       # see below

    [[workloads]]
    model = ["resnet50", "vgg16"]                        # of the zoo; or file = "mine.toml"
    batch = [32, 64]

    [[clusters]]
    notation = "{hosts}x8xV100@{rate}"
    axes = { hosts = [2, 4], rate = { from = "1Gbps", to = "100Gbps", points = 9 } }

    [[schedules]]
    notation = "bytescheduler"
    knobs = { partition = ["1MB", "4MB"], credit = { from = "4MB", to = "64MB", points = 5 } }

Every table is the product of what it lists, and the sweep the product of workloads, clusters, schedules and seeds.

Conditions exclude scenarios: ``"schedule = p3* and rate >= 50Gbps"``.

    condition    comparison [and comparison ...]
    comparison   NAME OP VALUE, where OP is one of = != < <= > >=

NAME is a column of the scenario's own: ``model``, ``batch``, ``precision``, ``device``, ``cluster``, ``schedule`` (a
policy's name), ``jitter``, ``seed``, an axis of its cluster or a knob of its schedule. VALUE is a number, a quantity
with a unit, another NAME, or, with = and !=, a text in which ``*`` stands for anything. What a scenario does not have
(a knob of another schedule) meets no comparison.

An axis takes values one by one or a range of them, with units or without.
"""

from __future__ import annotations

import math
import operator
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import msgspec

from foretrain.device import Precision
from foretrain.errors import ConfigError, unknown
from foretrain.files import read_text
from foretrain.units import SECOND, exact_rate, exact_size, exact_time, parse_rate, parse_size, parse_time

Value: TypeAlias = str | int | float
"""A number, or text as the notation of a cluster or a knob takes it: ``"10Gbps"``, ``"ring"``."""
_DIGITS = 3
"""Of values inside a range: they are read by people, and part of a scenario's identity."""
_EXAMPLE = 'write e.g. { from = "1Gbps", to = "100Gbps", points = 9 }'


class Range(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"low": "from", "high": "to"}):
    """``points`` values ``from`` … ``to``, both ends included, in geometric or equal steps."""

    low: Value
    high: Value
    points: int
    scale: Literal["log", "linear"] = "log"


Axis: TypeAlias = str | int | float | list[str | int | float] | Range
"""One value, several, or a range."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """Value as a number: bytes/s, bytes, seconds, or what it is without a unit.

    Attributes:
        kind: of what.
        number: how much.
    """

    kind: Literal["rate", "size", "time", "number"]
    number: float


def quantity(value: Value) -> Quantity | None:
    """Return ``value`` as a number with a kind; None for a text that is no quantity, such as a name."""
    if not isinstance(value, str):
        return Quantity("number", value)
    for kind, parse in _PARSERS.items():
        try:
            number = parse(value)
        except ConfigError:
            continue
        return Quantity(cast("Literal['rate', 'size', 'time']", kind), number / SECOND if kind == "time" else number)
    try:
        return Quantity("number", float(value))
    except ValueError:
        return None


_PARSERS: dict[str, Callable[[str], int | float]] = {"rate": parse_rate, "size": parse_size, "time": parse_time}


def values(axis: Axis, field: str) -> tuple[Value, ...]:
    """Return the values of ``axis``, in order, without repetition. Raises ConfigError for an empty list or range."""
    if isinstance(axis, Range):
        return tuple(dict.fromkeys(_spread(axis, field)))
    if isinstance(axis, list):
        if not axis:
            raise ConfigError(field, axis, "is empty", "name at least one value")
        return tuple(dict.fromkeys(axis))
    return (axis,)


def _spread(given: Range, field: str) -> list[Value]:
    """Return the values of a range.

    The ends stay as written; values inside are rounded to three digits, and to whole numbers where both ends are.
    """
    low, high = quantity(given.low), quantity(given.high)
    for end, text in ((low, given.low), (high, given.high)):
        if end is None:
            raise ConfigError(field, text, "is no end of a range", _EXAMPLE)
    assert low is not None
    assert high is not None
    if low.kind != high.kind:
        raise ConfigError(field, f"{given.low} to {given.high}", f"is from a {low.kind} to a {high.kind}", _EXAMPLE)
    if given.points < 2:
        raise ConfigError(f"{field}.points", given.points, "is not a number of points of a range", "take at least 2")
    if not low.number < high.number:
        raise ConfigError(field, f"{given.low} to {given.high}", "does not ascend", _EXAMPLE)
    if given.scale == "log" and low.number <= 0:
        raise ConfigError(field, given.low, "has no logarithm", "start above 0, or write scale = 'linear'")
    whole = isinstance(given.low, int) and isinstance(given.high, int)
    shares = (k / (given.points - 1) for k in range(1, given.points - 1))
    inside = (_written(_between(low, high, share, given.scale), whole) for share in shares)
    return [given.low, *inside, given.high]


def _between(low: Quantity, high: Quantity, share: float, scale: str) -> Quantity:
    if scale == "log":
        return Quantity(low.kind, low.number * math.exp(math.log(high.number / low.number) * share))
    return Quantity(low.kind, low.number + (high.number - low.number) * share)


def _written(value: Quantity, whole: bool) -> Value:
    if value.kind == "rate":
        return exact_rate(_rounded(value.number * 8) / 8)
    if value.kind == "size":
        return exact_size(math.ceil(_rounded(value.number)))
    if value.kind == "time":
        return exact_time(math.ceil(_rounded(value.number * SECOND)))
    return round(value.number) if whole else _rounded(value.number)


def _rounded(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}")


_ORDER = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
_COMPARISON = re.compile(r"\s*([\w-]+)\s*(<=|>=|!=|=|<|>)\s*(\S.*?)\s*")
_CONDITION_EXAMPLE = "write e.g. 'schedule = p3 and rate >= 50Gbps'"


@dataclass(frozen=True, slots=True)
class Term:
    """Comparison of a name with a value."""

    name: str
    relation: str
    value: str

    def holds(self, about: Mapping[str, Value]) -> bool:
        """Return whether the comparison holds for a scenario with the values ``about``."""
        if (mine := about.get(self.name)) is None:
            return False
        other = about.get(self.value, self.value)
        left, right = quantity(mine), quantity(other)
        if self.relation not in _ORDER:
            if left and right:
                same = left == right
            else:
                same = fnmatchcase(str(mine).lower(), str(other).lower())
            return same == (self.relation == "=")
        if left is None or right is None:
            worst = mine if left is None else other
            raise ConfigError(str(self), worst, "is no number to compare", "use = or != with texts")
        if left.kind != right.kind:
            problem = f"compares a {left.kind} with a {right.kind}"
            raise ConfigError(str(self), f"{mine} {self.relation} {other}", problem, "write both in one unit")
        return _ORDER[self.relation](left.number, right.number)

    def __str__(self) -> str:
        return f"{self.name} {self.relation} {self.value}"


@dataclass(frozen=True, slots=True)
class Condition:
    """Condition: comparisons that must all hold."""

    comparisons: tuple[Term, ...]

    def holds(self, about: Mapping[str, Value]) -> bool:
        """Return whether all comparisons hold."""
        return all(one.holds(about) for one in self.comparisons)


def condition(text: str, names: Collection[str]) -> Condition:
    """Return the condition that ``text`` spells, about ``names``. Raises ConfigError."""
    found = []
    for part in re.split(r"\s+and\s+", text.strip()):
        match = _COMPARISON.fullmatch(part)
        if match is None:
            raise ConfigError("exclude", part, "is no comparison", _CONDITION_EXAMPLE)
        if match[1] not in names:
            raise unknown("exclude", match[1], names)
        found.append(Term(match[1], match[2], match[3]))
    return Condition(tuple(found))


class WorkloadAxis(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Models of the zoo with what `foretrain.workload.zoo` takes, or recorded workloads, which take nothing."""

    model: str | list[str] | None = None
    file: str | list[str] | None = None
    batch: int | list[int] | Range | None = None
    precision: Precision | list[Precision] | None = None
    device: str | list[str] | None = None
    sequence: int | list[int] | Range | None = None
    throughput: float | None = None


class ClusterAxis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Notations of clusters, in which ``{name}`` stands for the values of the axis of that name."""

    notation: str | list[str]
    axes: dict[str, Axis] = {}


class ScheduleAxis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Notations of schedules, knobs to add to them, and whether the others are searched for their best."""

    notation: str | list[str]
    knobs: dict[str, Axis] = {}
    tuned: bool | None = None


class SweepFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys of a sweep file.

    Attributes:
        workloads: what is trained; a text is a model of the zoo.
        clusters: where; a text is a notation.
        schedules: how; a text is a notation.
        name: for people.
        seeds: of the jitter: how many, or which.
        jitter: relative spread of layer times, one or several.
        tuned: whether schedules that do not say so themselves have their free knobs searched.
        baseline: what speed-ups are counted from; its free knobs are searched.
        exclude: conditions; what meets one of them is left out.
        objectives: two columns that the Pareto front is made of; chosen by what varies where empty.
    """

    workloads: list[str | WorkloadAxis]
    clusters: list[str | ClusterAxis]
    schedules: list[str | ScheduleAxis]
    name: str = ""
    seeds: int | list[int] = 1
    jitter: float | list[float] = 0.0
    tuned: bool = False
    baseline: str = "ddp"
    exclude: list[str] = []
    objectives: list[str] = []


_TABLES: dict[str, type[msgspec.Struct]] = {
    "workloads": WorkloadAxis,
    "clusters": ClusterAxis,
    "schedules": ScheduleAxis,
}
"""Tables below the sweep itself; below them there are only ranges."""
_EXAMPLES = {"workloads": '["resnet50"]', "clusters": '["4x8xV100@10Gbps"]', "schedules": '["ddp", "bytescheduler"]'}
_PATH = re.compile(r"(?P<problem>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_MISSING = re.compile(r"Object missing required field `(.*)`")


def read(path: str | Path) -> SweepFile:
    """Return the sweep that the file at ``path`` declares. Raises ConfigError that names the file and the field."""
    text = read_text(path, "sweep", "give the path of a sweep's .toml file, in UTF-8")
    try:
        return parse(text)
    except ConfigError as error:
        raise error.at(str(path)) from None


def parse(text: str) -> SweepFile:
    """Return the sweep that ``text`` declares. Raises ConfigError that names the field, and near ones if unknown."""
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError("TOML", "", f"does not parse ({error})", "correct that line") from None
    try:
        sweep = msgspec.convert(table, SweepFile)
    except msgspec.ValidationError as error:
        raise _config_error(str(error), table) from None
    for field in _TABLES:
        if not getattr(sweep, field):
            raise ConfigError(field, [], "is empty", f"write e.g. {field} = {_EXAMPLES[field]}")
    return sweep


def _config_error(message: str, table: dict[str, Any]) -> ConfigError:
    """Return msgspec's error as a ConfigError."""
    found = _PATH.fullmatch(message)
    assert found is not None
    path, problem = found["path"] or "", found["problem"]
    below = f"{path}." if path else ""
    if match := _UNKNOWN.fullmatch(problem):
        if path and match[1] in SweepFile.__struct_fields__:
            remedy = f"it is of the whole sweep: write it above all [[{']], [['.join(_TABLES)}]]"
            return ConfigError(path, match[1], "is unknown there", remedy)
        return unknown(path or "sweep", match[1], _fields(path))
    if match := _MISSING.fullmatch(problem):
        example = _EXAMPLES.get(match[1], "...")
        return ConfigError(f"{below}{match[1]}", None, "is missing", f"write e.g. {match[1]} = {example}")
    return ConfigError(path or "sweep", _at(path, table), f"does not suit: {problem[:1].lower()}{problem[1:]}", _HELP)


_HELP = "see docs/sweep.md for what a sweep may say"


def _fields(path: str) -> tuple[str, ...]:
    """Return the fields that the table at ``path`` may have."""
    top, _, rest = path.partition(".")
    kind = SweepFile if not path else Range if rest else _TABLES.get(top.partition("[")[0], Range)
    return kind.__struct_encode_fields__


def _at(path: str, table: Any) -> object:
    """Return the value at ``path`` as far as the path names it; msgspec writes keys of a dictionary as ``[...]``."""
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]", path):
        if index == "...":
            break
        table = table[name] if name else table[int(index)]
    return table
