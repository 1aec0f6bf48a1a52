"""Off-line search of a policy's knobs, in their space of settings, which has distances and measured times.

The simulator is exact and takes milliseconds, so a pattern search beats a surrogate model. Every evaluation is
noiseless, so that each comparison is decided by one. From the better of two starting points, the published defaults and
the analytic optimum, each knob is moved by factors of 4, then 2, then √2, as long as that helps.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, Protocol

from foretrain.network import Place, cluster
from foretrain.schedule import POLICIES, Job, Knob, Spec, spec
from foretrain.simulation import simulate
from foretrain.simulation.simulation import bound, job_on
from foretrain.units import COST_SHIFT, Time
from foretrain.workload.step import Workload

_NORMAL = 1.4826
"""Standard deviations in a median absolute deviation, where values are normal."""
_FAR = 4.0
"""Standard deviations from the median at which a value is an outlier."""
_TRIM = 0.1
_MEDIAN = math.sqrt(math.pi / 2)
"""Error of a median of normal values over that of their mean."""


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
_FUSING = ("pace",)
"""Policies that fuse tensors without a knob for it."""
_STEP = math.log(2)
"""Distance of neighbours in a grid: a factor of 2."""


@dataclass(frozen=True, slots=True)
class Space:
    """Space of the free knobs of ``plan``: those that it does not set.

    Attributes:
        plan: a policy and the knobs that are kept.
        free: the others that are tunable.
        largest: bytes of the largest tensor.
        total: bytes of all.
        least: bytes of a partition, at least.
    """

    plan: Spec
    free: tuple[Knob, ...]
    largest: int
    total: int
    least: int = SMALLEST

    @classmethod
    def of(cls, plan: Spec, workload: Workload, *, running: bool = False, least: int = SMALLEST) -> Space:
        """Return the space for ``workload``; for a ``running`` job with the knobs that matter only under noise."""
        known = POLICIES[plan.name].knobs
        free = tuple(k for k in known if (k.tunable or (running and k.noisy)) and k.name not in plan.knobs)
        sizes = [gradient.size for gradient in workload.gradients]
        return cls(plan, free, max(sizes), sum(sizes), max(SMALLEST, least))

    def limits(self, knob: Knob, at: Spec | None = None) -> tuple[float, float]:
        """Return the least and the largest value of ``knob`` that makes a difference, at the other knobs of ``at``.

        Without ``at`` they are those of the whole space.
        """
        if knob.kind == "size":
            # Anything larger than all tensors changes nothing, nor does a partition larger than the largest tensor,
            # unless tensors are fused: then a partition is the largest chunk of several.
            alone = knob.name in ("partition", "slice") and not self._fuses(at)
            most = self.largest if alone else self.total
            least = max(self.least, self.total // _MOST_PARTS, knob.low)
            return float(least), float(min(max(most, 2 * least), knob.high))
        if knob.kind == "time":
            return float(max(_SHORTEST, knob.low)), float(min(_LONGEST, knob.high))
        return float(knob.low), float(knob.high)

    def _fuses(self, at: Spec | None) -> bool:
        """Return whether ``at``, or without it any point of the space, sends several tensors in a chunk."""
        if self.plan.name in _FUSING or (at is None and any(knob.name == "fuse" for knob in self.free)):
            return True
        return (at or self.plan).settings.get("fuse", 0) > 0

    def rounded(self, value: float, knob: Knob, at: Spec | None = None) -> float:
        """Return ``value`` with two significant digits, within the limits."""
        low, high = self.limits(knob, at)
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
        values = {knob.name: source.choice(knob.grid) for knob in self.free if knob.grid}
        at = self.at(**values)  # limits of sizes depend on it
        for knob in self.free:
            if not knob.grid:
                low, high = self.limits(knob, at)
                values[knob.name] = self.rounded(math.exp(source.uniform(math.log(low), math.log(high))), knob, at)
        return self.at(**{knob.name: values[knob.name] for knob in self.free})

    def grid(self, points: int) -> list[Spec]:
        """Return all combinations of ``points`` sizes and times each, and of the values of grids."""
        found: list[dict[str, float]] = [{}]
        for knob in sorted(self.free, key=lambda each: not each.grid):  # limits of sizes depend on values of grids
            found = [
                {**each, knob.name: value} for each in found for value in self._values(knob, self.at(**each), points)
            ]
        return [self.at(**{knob.name: each[knob.name] for knob in self.free}) for each in found]

    def _values(self, knob: Knob, at: Spec, points: int) -> Sequence[float]:
        if knob.grid:
            return knob.grid
        low, high = (math.log(limit) for limit in self.limits(knob, at))
        steps = [low + (high - low) * k / max(1, points - 1) for k in range(points)]
        return sorted({self.rounded(math.exp(step), knob, at) for step in steps})

    def neighbours(self, spec: Spec, knob: Knob, stride: float) -> list[Spec]:
        """Return ``spec`` with ``knob`` multiplied and divided by ``stride``, or one place up and down its grid.

        A value beyond a limit counts as the limit: between them nothing makes a difference.
        """
        value = spec.settings[knob.name]
        if knob.grid:
            here = _place(knob, value)
            near = [knob.grid[i] for i in (here - 1, here + 1) if 0 <= i < len(knob.grid)]
        else:
            low, high = self.limits(knob, spec)
            value = min(max(value, low), high)
            near = [self.rounded(value * factor, knob, spec) for factor in (stride, 1 / stride)]
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


_STRIDES = (4.0, 2.0, math.sqrt(2))
_ENOUGH = 2e-4
"""A gap to T* that is not worth another evaluation, and a gain that is not worth moving away for."""

_CAREFUL = 0.01
_WORTH = 2
"""Bytes of a careful partition, at least, over those below which an operation costs more than what it carries. The cost
model hides an operation's least time behind its bytes. Hosts do not that are as busy with operations as their links are
with bytes: at 0.8 times, three of them on two cores took a third longer than forecast."""
_FLIGHTS = 3
"""Partitions in a careful window. Collectives under way together share the link instead of queueing for it, so two end
at nearly the same moment, and the link idles until what they make room for is ordered; a third one bridges that."""


def tune(
    workload: Workload,
    where: str | Place,
    schedule: str | Spec,
    *,
    evaluations: int = 60,
    careful: bool = False,
    good: Time = 0,
    forecast: Callable[[Spec], Time] | None = None,
    tried: list[tuple[Spec, Time]] | None = None,
) -> Spec:
    """Return ``schedule`` with the knobs that minimise the simulated iteration time.

    Knobs that ``schedule`` sets are kept; the others are searched with at most ``evaluations`` simulations.
    The result is never worse than the defaults, unless ``careful``: then it stays at the analytic starting point, small
    partitions, three of them under way, and moves away from it step by step, only where each wins 1 %. In the simulator
    0.02 % is real; on a real link noise takes away more, and from large partitions, which promise as much, it takes
    most: Prophet's published ones, a block in one message, promised 1.1 % over a server and cost 18 %.

    Args:
        workload: one worker's step.
        where: a cluster or its notation.
        schedule: a policy or its notation.
        evaluations: most simulations.
        careful: see above.
        good: iteration time, ps, that ends the search; one within 0.02 % of T* always does.
        forecast: returns the iteration time under a schedule, ps; None simulates.
        tried: to which all that was simulated is appended, with its iteration time.
    """
    place, plan = cluster(where), spec(schedule)
    job = job_on(workload, place)
    space = _space(plan, workload, job, careful)
    if not space.free:
        return plan
    search = _Search(forecast or forecaster(workload, place), evaluations, _CAREFUL if careful else _ENOUGH)
    search.good = max(good, int(bound(workload, place).time * (1 + search.worth)))
    analytic = _analytic(space, job, _FLIGHTS if careful else 2)
    best = analytic if careful else search.better(plan, analytic)
    moving = [knob for knob in space.free if not (careful and knob.exact)]
    for stride in _STRIDES:
        moved = True
        while moved and not search.over:
            moved = False
            for knob in moving:
                near = space.neighbours(best, knob, stride)
                if careful and "credit" not in plan.knobs:
                    near = [_roomy(one, knob) for one in near]
                for candidate in near:
                    if search.better(best, candidate) is candidate:
                        best, moved = candidate, True
                        break
    if tried is not None:
        tried += search.known.values()
    return best


def start(workload: Workload, where: str | Place, schedule: str | Spec, *, careful: bool = False) -> Spec:
    """Return ``schedule`` with its open knobs at the analytic starting point of `tune`."""
    job = job_on(workload, cluster(where))
    return _analytic(_space(spec(schedule), workload, job, careful), job, _FLIGHTS if careful else 2)


def _space(plan: Spec, workload: Workload, job: Job, careful: bool) -> Space:
    return Space.of(plan, workload, least=_WORTH * job.cost.breakeven if careful else SMALLEST)


def forecaster(workload: Workload, place: Place) -> Callable[[Spec], Time]:
    """Return a function that simulates a schedule and returns its iteration time, ps."""
    return lambda plan: simulate(workload, place, plan, trace=False).iteration_time


class _Search:
    """Comparison of schedules that remembers what was simulated, in ``known``."""

    def __init__(self, forecast: Callable[[Spec], Time], evaluations: int, worth: float) -> None:
        self._forecast, self._evaluations = forecast, evaluations
        self.known: dict[str, tuple[Spec, Time]] = {}
        self.worth = worth
        self.good: Time = 0

    @property
    def over(self) -> bool:
        """Return whether further simulations would be wasted."""
        least = min((time for _, time in self.known.values()), default=self.good + 1)
        return len(self.known) >= self._evaluations or least <= self.good

    def better(self, old: Spec, new: Spec) -> Spec:
        """Return the faster one; ``old`` if they are nearly equal or the search is over."""
        least = self._time(old) * (1 - self.worth)
        return old if self.over or self._time(new) > least else new

    def _time(self, plan: Spec) -> Time:
        key = str(plan)
        if key not in self.known:
            self.known[key] = plan, self._forecast(plan)
        return self.known[key][1]


def _analytic(space: Space, job: Job, flights: int) -> Spec:
    """δ0 = sqrt(S·θ/κ) and W = max(2δ0, RTT/κ), the minimum of the overhead bound in `foretrain.schedule.bounds`.

    W is more ``flights`` of δ0 where these are not 2.
    Partitions below the break-even point, and chunks below four of them, are worth fusing.
    """
    kappa = job.cost.per_byte / (1 << COST_SHIFT)
    partition = math.sqrt(space.total * max(1, job.cost.overhead) / max(kappa, 1e-9))
    partition = max(partition, job.cost.breakeven)
    credit = max(flights * partition, job.cost.latency / max(kappa, 1e-9))
    guesses = {"partition": partition, "slice": partition, "credit": credit, "fuse": 4.0, "strict": 1.0}
    free = [knob for knob in space.free if knob.name in guesses]
    return space.at(**{k.name: guesses[k.name] if k.grid else space.rounded(guesses[k.name], k) for k in free})


def _roomy(plan: Spec, moved: Knob) -> Spec:
    """``plan`` with a window of at least `_FLIGHTS` partitions, and of as many where the partition is what moved."""
    known = plan.settings
    if "credit" not in known or "partition" not in known:
        return plan
    least = _FLIGHTS * known["partition"]
    if known["credit"] >= least and moved.name != "partition":
        return plan
    return Spec(plan.name, {**plan.knobs, "credit": least})
