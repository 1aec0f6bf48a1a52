"""Search among candidates: each is simulated once, or skipped where a bound says that it cannot win.

A candidate is a schedule and a way to exchange gradients: by all-reduce or parameter servers, in full or in
half precision.

T* of the place  ≥ best ─▶ nothing there can win
bound of policy  ≥ best ─▶ it cannot: with a barrier no less than WFBP, split at the barrier no less than DeAR
analytic knobs          ─▶ the field
a pattern search        ─▶ of the front runners, until one is near T*

# Note [Cost of compression]
Half precision halves the bytes and adds the work of rounding. The runtime rounds with error feedback
(`foretrain.plugins.torch.compression`). Of each value of 4 bytes it adds the residual (12 bytes of memory traffic),
rounds (6), takes what was sent from the residual (10) and clears what overflowed (8). When the sum is back it is
widened again (6). All of it streams through the memory of the device that computes, which has no time for anything else
meanwhile: rounding makes the backward pass longer, and widening the forward pass.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

from foretrain.device import preset
from foretrain.device.gpu import ACHIEVED_BANDWIDTH
from foretrain.errors import unknown
from foretrain.network import Cluster, Exchange, Place
from foretrain.planner.search import forecaster, start, tune
from foretrain.schedule import POLICIES, Bound, CostModel, Spec, spec
from foretrain.simulation.simulation import bound
from foretrain.units import COST_SHIFT, SECOND, Time, format_time
from foretrain.workload.step import Workload

COMPRESSIONS = ("fp16", "bf16")
"""Types that gradients may be sent as. Both have two bytes."""
_VALUE, _SENT = 4, 2
_ROUND, _WIDEN = 36, 6
"""Bytes of memory traffic for a value that is sent, and for one that comes back."""
_HOST_MEMORY = 10e9
"""Bytes/s that one core streams where no GPU is named."""
_HALF = re.compile(r"\bin (fp16|bf16)\b")


def streaming(place: Place) -> float:
    """Bytes/s at which the device of ``place`` streams its memory."""
    return _HOST_MEMORY if place.device is None else ACHIEVED_BANDWIDTH * preset(place.device).bandwidth


def halvable(workload: Workload) -> bool:
    """Return whether gradients have four bytes a value. Only a model of the zoo says that it has two."""
    return _HALF.search(workload.source) is None


def compressed(workload: Workload, kind: str | None, bandwidth: float) -> Workload:
    """``workload`` with gradients sent as ``kind``, rounded and widened at ``bandwidth`` bytes/s; None is as it is."""
    if kind is None:
        return workload
    if kind not in COMPRESSIONS:
        raise unknown("compression", kind, COMPRESSIONS)
    values = [0] * len(workload.layers)
    for gradient in workload.gradients:
        values[gradient.layer] += math.ceil(gradient.size / _VALUE)
    rounding = [math.ceil(_ROUND * count / bandwidth * SECOND) for count in values]
    widening = [math.ceil(_WIDEN * count / bandwidth * SECOND) for count in values]
    # The backward pass comes from behind: a gradient waits for the rounding of all deeper layers and of its own.
    late = list(accumulate(reversed(rounding)))[::-1]
    layers = tuple(
        replace(layer, forward=layer.forward + wide, backward=layer.backward + narrow)
        for layer, wide, narrow in zip(workload.layers, widening, rounding, strict=True)
    )
    gradients = tuple(
        replace(one, size=max(1, math.ceil(one.size * _SENT / _VALUE)), release=one.release + late[one.layer])
        for one in workload.gradients
    )
    return replace(workload, layers=layers, gradients=gradients)


def engine_of(place: Place) -> Exchange:
    """Return how gradients are summed on ``place``; a topology has collectives."""
    return place.exchange if isinstance(place, Cluster) else "all_reduce"


def engines(place: Place) -> tuple[Place, ...]:
    """``place`` with every engine that its hosts can have, all-reduce first.

    Servers of their own need hosts of their own, so that only a cluster which has some can use them. Servers beside
    the workers need nothing. A topology stays as it is.
    """
    if not isinstance(place, Cluster) or place.workers == 1:
        return (place,)
    plain = replace(place, exchange="all_reduce", servers=0, server_rate=None)
    found = [plain, replace(plain, exchange="ps_colocated")]
    return tuple(found if place in found else [*found, place])


def describe(place: Place) -> str:
    """The engine for people: ``"all-reduce"``, ``"4 parameter servers"``."""
    if not isinstance(place, Cluster):
        return f"all-reduce ({place.collective})"
    if place.exchange == "ps":
        return f"{place.servers} parameter server{'s' if place.servers > 1 else ''}"
    return "all-reduce" if place.exchange == "all_reduce" else "parameter servers beside the workers"


def cluster_of(cost: CostModel, ranks: int) -> Cluster:
    """Return the simple cluster of at least two ``ranks`` whose all-reduce costs ``cost``.

    A measured cost has a latency and a floor, which the cluster keeps. That of a simulated topology has neither
    (`foretrain.network.deployment.Deployment.cost`): there both are 0.
    """
    seconds_per_byte = cost.per_byte / (1 << COST_SHIFT) / SECOND
    rate = 2 * (ranks - 1) / ranks / max(seconds_per_byte, 1e-15)
    one_way = cost.latency // (2 * (ranks - 1))
    return Cluster(workers=ranks, up=rate, down=rate, latency=one_way, overhead=cost.overhead, floor=cost.floor)


ENOUGH = 0.01
"""Relative distance to a bound below which no search is worth it: no forecast is better than that."""
_SEARCHED = 0.02
"""A front runner that is further than this from its bound is worth a search."""
_ORDER = ("bytescheduler", "dear", "p3", "prophet", "pace", "mgwfbp", "fusion", "tic", "tictac", "fifo")
"""Candidates, those first that win most often and cost least to simulate, so that the others can be skipped.

`foretrain.schedule.IDEAL` is none: it is there to compare with.
"""
_BOUND_BY_WFBP = ("fifo", "ddp", "fusion", "mgwfbp")
_FRONT = 3
"""Number of candidates that are searched."""
_NEAR = 1.05
"""Time over the best's up to which a candidate is searched."""
_SEARCH = 14
"""Simulations of each search."""
_BASELINE = 18
"""Simulations for DDP's best bucket size."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Candidate: a policy with its knobs, an engine and a compression.

    Attributes:
        workload: what it exchanges, compressed.
        place: with its engine.
        compression: None, "fp16" or "bf16".
        schedule: the policy with the knobs it was simulated with.
        optimum: T* there.
        time: of an iteration, simulated; None where it was skipped.
        why_not: why it was.
    """

    workload: Workload
    place: Place
    compression: str | None
    schedule: Spec
    optimum: Bound
    time: Time | None = None
    why_not: str = ""

    @property
    def gap(self) -> float | None:
        """T/T* − 1 on its own engine; None where it was skipped."""
        return None if self.time is None else self.time / self.optimum.time - 1


class Setting:
    """Engine with a compression, and the iteration times simulated there.

    Args:
        workload: what is exchanged, compressed.
        place: with its engine.
        compression: what gradients are sent as.
        careful: as of `foretrain.planner.tune`.
    """

    def __init__(self, workload: Workload, place: Place, compression: str | None = None, careful: bool = False) -> None:
        self.workload, self.place, self.compression = workload, place, compression
        self.optimum = bound(workload, place)
        self.simulations = 0
        self._careful = careful
        self._known: dict[str, Time] = {}
        self._simulate: Callable[[Spec], Time] = forecaster(workload, place)

    def time(self, plan: Spec) -> Time:
        """Return the iteration time under ``plan``."""
        key = str(plan)
        if key not in self._known:
            self._known[key] = self._simulate(plan)
            self.simulations += 1
        return self._known[key]

    def candidate(self, plan: Spec) -> Candidate:
        """Return ``plan`` as a simulated candidate."""
        return replace(self.skipped(plan, ""), time=self.time(plan))

    def skipped(self, plan: Spec, why_not: str) -> Candidate:
        """Return ``plan`` as a candidate that was not simulated."""
        return Candidate(self.workload, self.place, self.compression, plan, self.optimum, why_not=why_not)

    def first(self, name: str) -> Candidate:
        """Return a policy with its analytic knobs."""
        return self.candidate(start(self.workload, self.place, name, careful=self._careful))

    def searched(self, name: str, evaluations: int = _SEARCH, enough: float = ENOUGH) -> Candidate:
        """Return a policy with searched knobs; the search ends within ``enough`` of the policy's own bound."""
        good = int(self.least(name) * (1 + enough))
        plan = tune(
            self.workload,
            self.place,
            name,
            evaluations=evaluations,
            careful=self._careful and name != "ddp",
            good=good,
            forecast=self.time,
        )
        return self.candidate(plan)

    def baseline(self) -> Candidate:
        """Return DDP at its best bucket size."""
        return self.searched("ddp", _BASELINE, ENOUGH / 4)

    def sharpened(self, one: Candidate) -> Candidate:
        """Return ``one`` after a longer search, where the last percent decides."""
        found = self.searched(one.schedule.name, 2 * _SEARCH, ENOUGH / 4)
        return min((one, found), key=lambda each: each.time or 0)

    def least(self, name: str) -> Time:
        """Return the lower bound of a policy's iteration time."""
        if name in _BOUND_BY_WFBP:
            return max(self.optimum.time, self.optimum.wfbp)
        return max(self.optimum.time, self.optimum.dear) if name == "dear" else self.optimum.time

    def field(self, best: Time) -> list[Candidate]:
        """Return every policy with analytic knobs, or why it cannot beat ``best``, the fastest time so far."""
        found = []
        for name in _ORDER:
            least = self.least(name)
            if least >= best * (1 - ENOUGH):
                which = "its own bound" if least > self.optimum.time else "T*"
                found.append(self.skipped(spec(name), f"cannot win: {which} is {format_time(least)}"))
                continue
            found.append(self.first(name))
            best = min(best, found[-1].time or best)
        return found


def run(settings: list[Setting], baseline: Candidate) -> list[Candidate]:
    """Return all candidates: those simulated by time, then those skipped."""
    assert baseline.time is not None
    best = baseline.time
    found: list[tuple[Setting, Candidate]] = []
    for setting in sorted(settings, key=lambda one: one.optimum.time):
        field = setting.field(best)
        best = min([best, *(one.time for one in field if one.time is not None)])
        found += [(setting, one) for one in field]
    front = sorted((pair for pair in found if pair[1].time is not None), key=_time)
    better: dict[int, Candidate] = {}
    for setting, one in [pair for pair in front if _time(pair) <= best * _NEAR][:_FRONT]:
        if best > setting.least(one.schedule.name) * (1 + _SEARCHED):
            found_now = setting.searched(one.schedule.name)
            if _time((setting, found_now)) < _time((setting, one)):
                better[id(one)] = found_now
                best = min(best, _time((setting, found_now)))
    done = [better.get(id(one), one) for _, one in found]
    return sorted(done, key=lambda one: (one.time is None, one.time or one.optimum.time))


def _time(pair: tuple[Setting, Candidate]) -> Time:
    assert pair[1].time is not None
    return pair[1].time


assert set(_ORDER) < set(POLICIES)
