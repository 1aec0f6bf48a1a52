"""What an axis of a sweep takes: values one by one, or a range of them, with units or without."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

import msgspec

from foretrain.errors import ConfigError
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
    """A value as a number: bytes/s, bytes, seconds, or what it is without a unit.

    Attributes:
        kind: of what.
        number: how much.
    """

    kind: Literal["rate", "size", "time", "number"]
    number: float


def quantity(value: Value) -> Quantity | None:
    """``value`` as a number with a kind; None for a text that is none, such as a name."""
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
    """All values of ``axis``, in order, each once. Raises ConfigError for an empty list and a range that is none."""
    if isinstance(axis, Range):
        return tuple(dict.fromkeys(_spread(axis, field)))
    if isinstance(axis, list):
        if not axis:
            raise ConfigError(field, axis, "is empty", "name at least one value")
        return tuple(dict.fromkeys(axis))
    return (axis,)


def _spread(given: Range, field: str) -> list[Value]:
    """Values inside are rounded to three digits, and to whole numbers where both ends are; the ends stay as written."""
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
