"""Off-line search: the simulator is exact and takes milliseconds, so a pattern search beats a surrogate model.

Every evaluation is noiseless, so that each comparison is decided by one. From the better of two starting points, the
published defaults and the analytic optimum, each knob is moved by factors of 4, then 2, then √2, as long as that helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from foretrain.network import Place, cluster
from foretrain.planner.knob_space import Space
from foretrain.schedule import Job, Knob, Spec, spec
from foretrain.simulation import simulate
from foretrain.simulation.simulation import bound, job_on
from foretrain.units import COST_SHIFT, Time
from foretrain.workload.step import Workload

_STRIDES = (4.0, 2.0, math.sqrt(2))
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
    good: Time = 0,
    forecast: Callable[[Spec], Time] | None = None,
    tried: list[tuple[Spec, Time]] | None = None,
) -> Spec:
    """Return ``schedule`` with the knobs that minimise the simulated iteration time.

    Knobs that ``schedule`` sets are kept; the others are searched with at most ``evaluations`` simulations.
    The result is never worse than the defaults, unless ``careful``: then it stays at the analytic starting point, small
    partitions, three of them under way, and moves away from it only where 1 % is to be won. In the simulator 0.02 % is
    real; on a real link noise takes away more, and from large partitions, which promise as much, it takes most.

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
    space = Space.of(plan, workload)
    if not space.free:
        return plan
    search = _Search(forecast or forecaster(workload, place), evaluations, _CAREFUL if careful else _ENOUGH)
    search.good = max(good, int(bound(workload, place).time * (1 + search.worth)))
    analytic = _analytic(space, job_on(workload, place), _FLIGHTS if careful else 2)
    best = search.better(analytic, plan) if careful else search.better(plan, analytic)
    for stride in _STRIDES:
        moved = True
        while moved and not search.over:
            moved = False
            for knob in space.free:
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
    space = Space.of(spec(schedule), workload)
    return _analytic(space, job_on(workload, cluster(where)), _FLIGHTS if careful else 2)


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
