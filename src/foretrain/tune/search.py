"""Off-line search: the simulator is exact and takes milliseconds, so a pattern search beats a surrogate model.

Every evaluation is noiseless, so that each comparison is decided by one. From the better of two starting points, the
published defaults and the analytic optimum, each knob is moved by factors of 4, then 2, then √2, as long as that helps.
"""

from __future__ import annotations

import math

from foretrain.network import Place, cluster
from foretrain.schedule import POLICIES, Job, Knob, Spec, spec
from foretrain.units import COST_SHIFT, Time
from foretrain.virtual import simulate
from foretrain.virtual.simulation import bound, job_on
from foretrain.workload.step import Workload

_STRIDES = (4.0, 2.0, math.sqrt(2))
_SMALLEST = 16_000
"""Bytes: below it an operation costs more than its data on every link of 1 Gb/s or more."""
_ENOUGH = 2e-4
"""A gap to T* that is not worth another evaluation, and a gain that is not worth moving away for."""

_CAREFUL = 0.01
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
) -> Spec:
    """The knobs of ``schedule`` that minimise the simulated iteration time.

    Knobs that ``schedule`` sets are kept; the others are searched with at most ``evaluations`` simulations.
    The result is never worse than the defaults, unless ``careful``: then it stays at the analytic starting point, small
    partitions, three of them under way, and moves away from it only where 1 % is to be won. In the simulator 0.02 % is
    real; on a real link noise takes away more, and from large partitions, which promise as much, it takes most.
    """
    place, plan = cluster(where), spec(schedule)
    free = [knob for knob in POLICIES[plan.name].knobs if knob.tunable and knob.name not in plan.knobs]
    if not free:
        return plan
    search = _Search(workload, place, plan, evaluations, _CAREFUL if careful else _ENOUGH)
    analytic = _analytic(plan, free, workload, job_on(workload, place), _FLIGHTS if careful else 2)
    best = search.better(analytic, plan) if careful else search.better(plan, analytic)
    for stride in _STRIDES:
        moved = True
        while moved and not search.over:
            moved = False
            for knob in free:
                near = _neighbours(best, knob, stride, workload)
                if careful and "credit" not in plan.knobs:
                    near = [_roomy(one, knob) for one in near]
                for candidate in near:
                    if search.better(best, candidate) is candidate:
                        best, moved = candidate, True
                        break
    return best


class _Search:
    """Remembers what was simulated."""

    def __init__(self, workload: Workload, place: Place, plan: Spec, evaluations: int, worth: float) -> None:
        self._workload = workload
        self._place = place
        self._evaluations = evaluations
        self._known: dict[str, Time] = {}
        self._worth = worth
        self._good = int(bound(workload, place).time * (1 + worth))

    @property
    def over(self) -> bool:
        """Whether more would be wasted."""
        return len(self._known) >= self._evaluations or min(self._known.values(), default=self._good + 1) <= self._good

    def better(self, old: Spec, new: Spec) -> Spec:
        """The faster one; ``old`` where they are as good as equal and when the search is over."""
        least = self._time(old) * (1 - self._worth)
        return old if self.over or self._time(new) > least else new

    def _time(self, plan: Spec) -> Time:
        key = str(plan)
        if key not in self._known:
            run = simulate(self._workload, self._place, plan, trace=False)
            self._known[key] = run.iteration_time
        return self._known[key]


def _analytic(plan: Spec, free: list[Knob], workload: Workload, job: Job, flights: int) -> Spec:
    """δ0 = sqrt(S·θ/κ) and W = max(2δ0, RTT/κ), the minimum of the overhead bound in `foretrain.schedule.bounds`.

    W is more ``flights`` of δ0 where these are not 2.
    Partitions below the break-even point, and chunks below four of them, are worth fusing.
    """
    kappa = job.cost.per_byte / (1 << COST_SHIFT)
    partition = math.sqrt(workload.size * max(1, job.cost.overhead) / max(kappa, 1e-9))
    partition = max(partition, job.cost.breakeven)
    credit = max(flights * partition, job.cost.latency / max(kappa, 1e-9))
    guesses = {"partition": partition, "slice": partition, "credit": credit, "fuse": 4.0, "strict": 1.0}
    chosen = {
        k.name: guesses[k.name] if k.grid else _round(guesses[k.name], k, workload) for k in free if k.name in guesses
    }
    return Spec(plan.name, {**plan.knobs, **chosen})


def _neighbours(plan: Spec, knob: Knob, stride: float, workload: Workload) -> list[Spec]:
    value = plan.settings[knob.name]
    if knob.grid:
        here = min(range(len(knob.grid)), key=lambda i: abs(knob.grid[i] - value))
        near = [knob.grid[i] for i in (here - 1, here + 1) if 0 <= i < len(knob.grid)]
    else:
        near = [_round(value * factor, knob, workload) for factor in (stride, 1 / stride)]
    return [Spec(plan.name, {**plan.knobs, knob.name: new}) for new in near if new != value]


def _roomy(plan: Spec, moved: Knob) -> Spec:
    """``plan`` with a window of at least `_FLIGHTS` partitions, and of as many where the partition is what moved."""
    known = plan.settings
    if "credit" not in known or "partition" not in known:
        return plan
    least = _FLIGHTS * known["partition"]
    if known["credit"] >= least and moved.name != "partition":
        return plan
    return Spec(plan.name, {**plan.knobs, "credit": least})


def _round(value: float, knob: Knob, workload: Workload) -> float:
    """Two significant digits, within what makes a difference to ``workload``."""
    if knob.kind == "size":
        # A partition larger than the largest tensor, or anything larger than all of them, changes nothing any more.
        largest = max(gradient.size for gradient in workload.gradients)
        most = largest if knob.name in ("partition", "slice") else workload.size
        value = max(min(value, most), _SMALLEST)
    digits = 1 - math.floor(math.log10(value))
    return knob.check(min(max(round(value, digits), knob.low), knob.high))
