"""Search space of a policy's knobs, with distances between settings, and iteration times measured at its points."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, Protocol

from foretrain.schedule import POLICIES, Knob, Spec
from foretrain.workload.step import Workload

_NORMAL = 1.4826
"""Standard deviations in a median absolute deviation, where values are normal."""
_FAR = 4.0
"""Standard deviations from the median at which a value is an outlier."""
_TRIM = 0.1
_MEDIAN = math.sqrt(math.pi / 2)
"""How much further a median of normal values is off than their mean."""


class IterationTimes(NamedTuple):
    """Measured iteration time with one setting of knobs.

    Attributes:
        time: what one takes, in the unit of what was given.
        error: the standard error of that, in the same unit.
        iterations: how many were measured.
    """

    time: float
    error: float
    iterations: int


def robust(times: Sequence[float]) -> IterationTimes:
    """Return the median of ``times`` without outliers and without a tenth at both ends.

    ByteScheduler (SOSP 2019) trims ends and takes the mean of more than a hundred iterations; the median of a few
    resists what a checkpoint or a neighbour costs now and then. Outliers are those further than four standard
    deviations from the median, by the median absolute deviation.
    """
    middle = median(times)
    off = _NORMAL * median(abs(time - middle) for time in times)
    near = sorted(time for time in times if abs(time - middle) <= _FAR * off) or [middle]
    cut = int(_TRIM * len(near))
    kept = near[cut : len(near) - cut]
    spread = _NORMAL * median(abs(time - middle) for time in near)
    return IterationTimes(median(kept), _MEDIAN * spread / math.sqrt(len(near)), len(times))


SMALLEST = 16_000
"""Bytes: below it an operation costs more than its data on every link of 1 Gb/s or more."""
_MOST_PARTS = 4096
"""Of all tensors: more cost their operations' start, tens of µs each, more than they can win."""
_SHORTEST, _LONGEST = 100_000_000, 100_000_000_000
"""ps: cycles of fusion that are worth a try."""
_STEP = math.log(2)
"""What one place in a grid is worth: a factor of 2."""


@dataclass(frozen=True, slots=True)
class Space:
    """Space of the free knobs of ``plan``: those that it does not set.

    Attributes:
        plan: a policy and the knobs that are kept.
        free: the others that are tunable.
        largest: bytes of the largest tensor.
        total: bytes of all.
    """

    plan: Spec
    free: tuple[Knob, ...]
    largest: int
    total: int

    @classmethod
    def of(cls, plan: Spec, workload: Workload, *, running: bool = False) -> Space:
        """Return the space for ``workload``; for a ``running`` job with the knobs that matter only under noise."""
        known = POLICIES[plan.name].knobs
        free = tuple(k for k in known if (k.tunable or (running and k.noisy)) and k.name not in plan.knobs)
        sizes = [gradient.size for gradient in workload.gradients]
        return cls(plan, free, max(sizes), sum(sizes))

    def limits(self, knob: Knob) -> tuple[float, float]:
        """Return the least and the largest value of ``knob`` that makes a difference."""
        if knob.kind == "size":
            # A partition larger than the largest tensor, or anything larger than all of them, changes nothing.
            most = self.largest if knob.name in ("partition", "slice") else self.total
            least = max(SMALLEST, self.total // _MOST_PARTS, knob.low)
            return float(least), float(min(max(most, 2 * least), knob.high))
        if knob.kind == "time":
            return float(max(_SHORTEST, knob.low)), float(min(_LONGEST, knob.high))
        return float(knob.low), float(knob.high)

    def rounded(self, value: float, knob: Knob) -> float:
        """Return ``value`` with two significant digits, within the limits."""
        low, high = self.limits(knob)
        value = max(min(value, high), low)
        if value > 0:
            value = round(value, 1 - math.floor(math.log10(value)))
        return knob.check(min(max(value, knob.low), knob.high))

    def at(self, **values: float) -> Spec:
        """Return the policy with these knobs and those that are kept."""
        return Spec(self.plan.name, {**self.plan.knobs, **values})

    def point(self, spec: Spec) -> tuple[float, ...]:
        """Return the coordinates of ``spec``: natural logarithms of sizes and times, places in grids."""
        settings = spec.settings
        return tuple(
            _STEP * _place(knob, settings[knob.name]) if knob.grid else math.log(max(settings[knob.name], 1e-12))
            for knob in self.free
        )

    def random(self, source: random.Random) -> Spec:
        """Return a random point, sizes and times by their logarithms."""
        values = {}
        for knob in self.free:
            if knob.grid:
                values[knob.name] = source.choice(knob.grid)
            else:
                low, high = self.limits(knob)
                values[knob.name] = self.rounded(math.exp(source.uniform(math.log(low), math.log(high))), knob)
        return self.at(**values)

    def grid(self, points: int) -> list[Spec]:
        """Return all combinations of ``points`` sizes and times each, and of the values of grids."""
        found: list[dict[str, float]] = [{}]
        for knob in self.free:
            if knob.grid:
                values = list(knob.grid)
            else:
                low, high = (math.log(limit) for limit in self.limits(knob))
                steps = [low + (high - low) * k / max(1, points - 1) for k in range(points)]
                values = sorted({self.rounded(math.exp(step), knob) for step in steps})
            found = [{**each, knob.name: value} for each in found for value in values]
        return [self.at(**each) for each in found]

    def neighbours(self, spec: Spec, knob: Knob, stride: float) -> list[Spec]:
        """Return ``spec`` with ``knob`` multiplied and divided by ``stride``, or one place up and down its grid."""
        value = spec.settings[knob.name]
        if knob.grid:
            here = _place(knob, value)
            near = [knob.grid[i] for i in (here - 1, here + 1) if 0 <= i < len(knob.grid)]
        else:
            near = [self.rounded(value * factor, knob) for factor in (stride, 1 / stride)]
        return [Spec(spec.name, {**spec.knobs, knob.name: new}) for new in near if new != value]


def _place(knob: Knob, value: float) -> int:
    return min(range(len(knob.grid)), key=lambda i: abs(knob.grid[i] - value))


class Proposer(Protocol):
    """Proposes knobs to try, and learns from what was measured."""

    @property
    def best(self) -> Spec:
        """Return the best knobs known; the starting point before anything was measured."""
        ...

    def ask(self) -> Spec | None:
        """Return the knobs to try next, or None where nothing more can be gained."""
        ...

    def tell(self, spec: Spec, sample: IterationTimes) -> None:
        """Record that ``spec`` was measured; may be called several times for one ``spec``."""
        ...
