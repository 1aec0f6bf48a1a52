"""Forecasts for a tuner: the virtual world of a job, which is put right when the real one changes."""

from __future__ import annotations

import math

from foretrain.network import Place
from foretrain.planner.knob_space import Space
from foretrain.planner.objective import IterationTimes
from foretrain.planner.search import explore
from foretrain.planner.simulator_prior import SimulatorPrior
from foretrain.schedule import Spec
from foretrain.simulation import simulate
from foretrain.units import to_seconds
from foretrain.workload.step import Workload

_AGAIN = 24
"""Simulations of a search in a running job, which waits for it."""
_FURTHEST = 64.0
"""How much faster or slower than it was a link may have become."""
_HALVINGS = 8


class JobForecaster:
    """Forecasts of ``workload`` on ``place`` under ``plan``, whose free knobs are searched.

    ``earlier``: what is known first is of an earlier run; ``place`` is as it is now.
    """

    def __init__(self, workload: Workload, place: Place, plan: Spec, *, earlier: bool = False) -> None:
        self._workload, self.place, self._plan, self._earlier = workload, place, plan, earlier
        self._times: dict[str, float] = {}
        self._latest: SimulatorPrior | None = None

    def forecast(self, spec: Spec) -> float:
        """Seconds of an iteration."""
        key = str(spec)
        if key not in self._times:
            self._times[key] = self._on(self.place, spec)
        return self._times[key]

    def informed(self, start: Spec | None = None, *, evaluations: int = 60, careful: bool = False) -> SimulatorPrior:
        """A proposer that begins with ``start``, or with the best by what is forecast and was learnt."""
        found = explore(self._workload, self.place, self._plan, evaluations=evaluations, careful=careful)
        known = [(spec, to_seconds(time)) for spec, time in found.times]
        self._times.update((str(spec), time) for spec, time in known)
        space = Space.of(self._plan, self._workload, running=True)
        learnt = self._latest.learnt if self._latest is not None else ()
        start = start or (None if learnt else found.best)
        self._latest = SimulatorPrior(space, self.forecast, known, start, learnt)
        return self._latest

    def again(self, spec: Spec, before: IterationTimes, now: IterationTimes) -> SimulatorPrior:
        """A proposer for what the job has become: the link is as fast as makes ``spec`` take what it takes now.

        A slower computation may be the reason as well; then forecasts are wrong by more, and samples tell.
        """
        if self._earlier:
            self._earlier = False
        else:
            self.place = self._scaled(spec, self._on(self.place, spec) * now.time / before.time)
            self._times.clear()
        return self.informed(evaluations=_AGAIN)

    def _scaled(self, spec: Spec, wanted: float) -> Place:
        """The place with the bandwidth with which ``spec`` takes ``wanted``; as it is where none does."""
        low, high = -math.log(_FURTHEST), math.log(_FURTHEST)
        if not self._at(high, spec) < wanted < self._at(low, spec):
            return self.place
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self._at(middle, spec) > wanted:
                low = middle
            else:
                high = middle
        return self.place.scaled(math.exp((low + high) / 2))

    def _at(self, faster: float, spec: Spec) -> float:
        return self._on(self.place.scaled(math.exp(faster)), spec)

    def _on(self, place: Place, spec: Spec) -> float:
        return to_seconds(simulate(self._workload, place, spec, trace=False).iteration_time)
