"""Values of a sweep's axes, and conditions that exclude scenarios: ``"schedule = p3* and rate >= 50Gbps"``.

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
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias, cast

import msgspec

from foretrain.errors import ConfigError, unknown
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
