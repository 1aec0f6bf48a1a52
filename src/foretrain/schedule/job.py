"""Job and knobs, which a policy is made of.

A job is its tasks, their expected release times and the cost of sending. Knobs are declared as data beside each policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from foretrain.errors import ConfigError
from foretrain.tasks import Task
from foretrain.units import COST_SHIFT, Time, exact_size, exact_time, moving, parse_size, parse_time
from foretrain.workload.step import Workload

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
        exact: True for what pays only where times are as exact as the simulator's; a careful search leaves it alone.
        grid: values worth trying, where a geometric search makes no sense.
    """

    name: str
    default: KnobValue
    low: float
    high: float
    kind: Literal["size", "time", "factor", "count", "sizes"] = "size"
    tunable: bool = True
    noisy: bool = False
    exact: bool = False
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
        short = f"{value:g}"
        if self.kind == "factor" and "e" in short and float(short) == value:
            return short.replace("e+0", "e")  # 1e6 is read at once, 1000000.0 is not
        return repr(value)


@dataclass(frozen=True, slots=True)
class CostModel:
    """The α–β model of one operation, as MG-WFBP and Prophet use it.

    Attributes:
        overhead: θ, time of an operation whatever its size.
        per_byte: κ in the fixed point of `units.per_byte`.
        latency: time an operation spends on the way without occupying the link.
        elsewhere: what a byte costs on the other pipes of its way together, in the same fixed point.
        floor: least time that an operation occupies the link, hidden behind the bytes of larger ones.
    """

    overhead: Time
    per_byte: int
    latency: Time = 0
    elsewhere: int = 0
    floor: Time = 0

    @property
    def breakeven(self) -> int:
        """Bytes below which an operation costs more than what it carries: α/κ."""
        return (self.startup << COST_SHIFT) // max(1, self.per_byte)

    @property
    def startup(self) -> Time:
        """Return α: the cost of the smallest operation."""
        return max(self.overhead, self.floor)

    def time(self, size: int) -> Time:
        """Return how long ``size`` bytes occupy the link."""
        return max(self.floor, self.overhead + moving(size, self.per_byte))

    def delay(self, size: int) -> Time:
        """Return the delay of ``size`` bytes in addition to the time they occupy the link."""
        return self.latency + moving(size, self.elsewhere)


@dataclass(frozen=True, slots=True)
class Job:
    """Workload as the scheduler sees it.

    Attributes:
        tasks: indexed by `Task.index`, registration order.
        layers: per task, the layer that uses it first.
        releases: per task, r: ps after the start of the backward pass.
        tails: per task, q: ps that must still pass after it lands, its update and the rest of the forward pass.
        forward: per layer.
        backward: Σ of all layers.
        cost: of one exchange.
        separate: whether each worker has a scheduler of its own, as over a parameter server.
        beside: whether such servers are on the workers' hosts, and so share their links.
    """

    tasks: tuple[Task, ...]
    layers: tuple[int, ...]
    releases: tuple[Time, ...]
    tails: tuple[Time, ...]
    forward: tuple[Time, ...]
    backward: Time
    cost: CostModel
    separate: bool = False
    beside: bool = False

    @classmethod
    def of(cls, workload: Workload, cost: CostModel, *, separate: bool = False, beside: bool = False) -> Job:
        """Return the job of ``workload`` on a network of ``cost``."""
        gradients = workload.gradients
        order = sorted(range(len(gradients)), key=lambda i: (gradients[i].layer, i))
        rank = {index: place for place, index in enumerate(order)}
        left, after = workload.forward, []
        for layer in workload.layers:
            after.append(layer.update + left)
            left -= layer.forward
        return cls(
            tasks=tuple(Task(i, g.name, g.size, rank[i]) for i, g in enumerate(gradients)),
            layers=tuple(g.layer for g in gradients),
            releases=tuple(g.release for g in gradients),
            tails=tuple(after[g.layer] for g in gradients),
            forward=tuple(layer.forward for layer in workload.layers),
            backward=workload.backward,
            cost=cost,
            separate=separate,
            beside=beside,
        )

    @property
    def by_urgency(self) -> tuple[int, ...]:
        """Task indices, the first used first."""
        return tuple(sorted(range(len(self.tasks)), key=lambda i: self.tasks[i].first_use))

    @property
    def by_release(self) -> tuple[int, ...]:
        """Task indices in the order the backward pass releases them; of one instant the deepest layer first."""
        return tuple(sorted(range(len(self.tasks)), key=lambda i: (self.releases[i], -self.layers[i], i)))
