"""Knobs of policies, declared as data beside each policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from foretrain.errors import ConfigError
from foretrain.units import exact_size, exact_time, parse_size, parse_time

KnobValue = Any
"""A number; of a knob of kind "sizes" a tuple of bytes, which no search changes, so that all others are numbers."""


@dataclass(frozen=True, slots=True)
class Knob:
    """Number, or list of sizes, that a policy takes.

    Attributes:
        name: the keyword argument of the policy's constructor.
        default: as published where a paper gives one.
        low: smallest value allowed.
        high: largest value allowed.
        kind: bytes, picoseconds, a plain factor, a count or a list of bytes; says how it is written and read.
        tunable: False for what describes a mechanism rather than a trade-off.
        noisy: True for what is worth a search where times vary, in a running job, and changes nothing in the simulator.
        grid: values worth trying, where a geometric search makes no sense.
    """

    name: str
    default: KnobValue
    low: float
    high: float
    kind: Literal["size", "time", "factor", "count", "sizes"] = "size"
    tunable: bool = True
    noisy: bool = False
    grid: tuple[float, ...] = ()

    def check(self, value: KnobValue) -> KnobValue:
        """Return ``value`` in the knob's type; ConfigError where it is out of range."""
        if self.kind == "sizes":
            return self._check_sizes(value)
        whole = self.kind != "factor"
        if isinstance(value, bool) or not isinstance(value, int | float) or (whole and value != value // 1):
            raise ConfigError(
                self.name, value, "is not a number of this knob", f"write e.g. '{self.write(self.default)}'"
            )
        if not self.low <= value <= self.high:  # also true of NaN
            span = f"{self.write(self.low)} to {self.write(self.high)}"
            raise ConfigError(self.name, self.write(value), "is out of range", f"allowed: {span}")
        return int(value) if whole else float(value)

    def _check_sizes(self, values: KnobValue) -> tuple[int, ...]:
        listed = isinstance(values, tuple | list) and all(type(value) is int for value in values)
        if not listed or not all(self.low <= value <= self.high for value in values):
            span = f"sizes of {exact_size(int(self.low))} to {exact_size(int(self.high))}"
            raise ConfigError(self.name, values, f"is not a list of {span}", "write e.g. '[1MB, 8MB, 25MB]'")
        return tuple(values)

    def parse(self, text: str) -> KnobValue:
        """Return the value that ``text`` spells."""
        if self.kind == "sizes":
            inside = text.strip().removeprefix("[").removesuffix("]")
            return tuple(parse_size(size.strip(), self.name) for size in inside.split(",") if size.strip())
        if self.kind == "size":
            return parse_size(text, self.name)
        if self.kind == "time":
            return parse_time(text, self.name)
        try:
            return int(text) if self.kind == "count" else float(text)
        except ValueError:
            raise ConfigError(self.name, text, "is not a number", f"write e.g. '{self.write(self.default)}'") from None

    def write(self, value: KnobValue) -> str:
        """Return text that `parse` turns back into exactly ``value``."""
        if isinstance(value, tuple):
            return f"[{', '.join(map(exact_size, value))}]"
        if self.kind in ("size", "sizes") and value == value // 1:
            return exact_size(int(value))
        if self.kind == "time" and value == value // 1:
            return exact_time(int(value))
        return repr(value)
