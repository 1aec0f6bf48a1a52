"""Search among candidates: each is simulated once, or skipped where a bound says that it cannot win.

T* of the place  ≥ best ─▶ nothing there can win
bound of policy  ≥ best ─▶ it cannot: with a barrier no less than WFBP, split at the barrier no less than DeAR
analytic knobs          ─▶ the field
a pattern search        ─▶ of the front runners, until one is near T*
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from foretrain.network import Place
from foretrain.planner.search import forecaster, start, tune
from foretrain.schedule import POLICIES, Bound, Spec, spec
from foretrain.simulation.simulation import bound
from foretrain.units import Time, format_time
from foretrain.workload.step import Workload

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
"""How many are searched."""
_NEAR = 1.05
"""How far behind one may be to be searched."""
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
