"""Knobs of policies, declared as data beside each policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from foretrain.errors import ConfigError
from foretrain.units import exact_size, exact_time, parse_size, parse_time


@dataclass(frozen=True, slots=True)
class Knob:
    """Number that a policy takes.

    Attributes:
        name: the keyword argument of the policy's constructor.
        default: as published where a paper gives one.
        low: smallest value allowed.
        high: largest value allowed.
        kind: bytes, picoseconds or a plain factor; says how it is written and read.
        tunable: False for what describes a mechanism rather than a trade-off.
        noisy: True for what is worth a search where times vary, in a running job, and changes nothing in the simulator.
        grid: values worth trying, where a geometric search makes no sense.
    """

    name: str
    default: float
    low: float
    high: float
    kind: Literal["size", "time", "factor", "count"] = "size"
    tunable: bool = True
    noisy: bool = False
    grid: tuple[float, ...] = ()

    def check(self, value: float) -> float:
        """Return ``value`` in the knob's type; ConfigError where it is out of range."""
        whole = self.kind != "factor"
        if isinstance(value, bool) or not isinstance(value, int | float) or (whole and value != value // 1):
            raise ConfigError(
                self.name, value, "is not a number of this knob", f"write e.g. '{self.write(self.default)}'"
            )
        if not self.low <= value <= self.high:  # also true of NaN
            span = f"{self.write(self.low)} to {self.write(self.high)}"
            raise ConfigError(self.name, self.write(value), "is out of range", f"allowed: {span}")
        return int(value) if whole else float(value)

    def parse(self, text: str) -> float:
        """Return the value that ``text`` spells."""
        if self.kind == "size":
            return parse_size(text, self.name)
        if self.kind == "time":
            return parse_time(text, self.name)
        try:
            return int(text) if self.kind == "count" else float(text)
        except ValueError:
            raise ConfigError(self.name, text, "is not a number", f"write e.g. '{self.write(self.default)}'") from None

    def write(self, value: float) -> str:
        """Return text that `parse` turns back into exactly ``value``."""
        if self.kind == "size" and value == value // 1:
            return exact_size(int(value))
        if self.kind == "time" and value == value // 1:
            return exact_time(int(value))
        return repr(value)
