"""Bayesian optimisation of knobs with the simulator as prior, and the forecasts of a running job that it starts from.

    log time = log forecast + what the machine is faster or slower at in all + what it is here + noise

The third is a Gaussian process over knobs: where one setting took 4 % more than forecast, so will its neighbours, and
those far away are as uncertain as before. What was learnt of it before the link changed is believed for the most part.
A forecast is seldom right about the time, but often about which
knobs are good; so the first sample is near the best, and few more correct it.

The literature's tuners (ByteScheduler, SOSP 2019, 5.3) begin with ten points at random.

`JobForecaster` simulates the job, and rescales the simulated link when the job's iteration times change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretrain.network import Place
from foretrain.planner.search import IterationTimes, Space, tune
from foretrain.schedule import Spec
from foretrain.simulation import simulate
from foretrain.units import Time, to_seconds
from foretrain.workload.step import Workload

Forecast = Callable[[Spec], float]
"""Seconds, or any other unit, of an iteration."""

_WRONG = 0.03
"""Standard deviation of what a forecast is wrong by from one setting to another, far away."""
_NEAR = math.log(4)
"""The factor between two sizes whose forecasts are wrong alike: e-folding of the correlation, squared exponential."""
_LASTING = 0.9
"""Of what a forecast is wrong by: how alike it is before and after the link has changed."""
_LEVEL = 1.0
"""Standard deviation of what it is wrong by in all, as a logarithm: next to nothing is assumed."""
_QUIET = 0.004
"""The least standard error of a sample that is believed: machines drift from one window to the next."""
_WORTH = 0.002
"""An expected improvement that is not worth another sample."""
_MOST = 12
_STRIDES = (2.0, 8.0)
"""Next to the best, and so far away that a forecast may be wrong in another way."""


class Correction(NamedTuple):
    """Error of one forecast, by a measured sample.

    Attributes:
        spec: the setting.
        off: the logarithm of how many times as long as forecast it took.
        error: standard error of that.
        age: changes of the link since.
    """

    spec: Spec
    off: float
    error: float
    age: int = 0


class SimulatorPrior:
    """Proposes by expected improvement over the setting that is best by all that is known.

    Args:
        space: the free knobs.
        forecast: of any setting; told of each once.
        known: settings whose forecasts are known already: those a search has tried.
        start: runs first; the best by all that is known where None.
        learnt: before the link changed, when ``forecast`` was another.
        most: samples.
        worth: expected improvement, as a share of the time, below which nothing is tried any more.
    """

    def __init__(
        self,
        space: Space,
        forecast: Forecast,
        known: Iterable[tuple[Spec, float]],
        start: Spec | None = None,
        learnt: Iterable[Correction] = (),
        *,
        most: int = _MOST,
        worth: float = _WORTH,
    ) -> None:
        self._space, self._forecast, self._most, self._worth = space, forecast, most, worth
        self._pool: dict[str, int] = {}
        self._specs: list[Spec] = []
        self._logs: list[float] = []
        self._points: list[tuple[float, ...]] = []
        for spec, time in known:
            self._add(spec, time)
        default = space.at()
        self._add(default)
        if start is not None:
            self._add(start)
        self._told: list[tuple[int, IterationTimes]] = []
        self._learnt = [each._replace(age=each.age + 1) for each in learnt]
        for each in self._learnt:
            self._add(each.spec)
        self._start = start or self._specs[int(np.argmin(self._believed()[0]))]
        self._best = self._pool[str(self._start)]
        self._widen(self._best)

    @property
    def best(self) -> Spec:
        """Return the tried knobs with the lowest expected time; the start before any was tried."""
        return self._specs[self._best]

    @property
    def learnt(self) -> list[Correction]:
        """Return the corrections of all samples so far."""
        return [*self._learnt, *(self._lesson(place, sample) for place, sample in self._told)]

    def ask(self) -> Spec | None:
        """Return the knobs with the largest expected improvement; the start at first."""
        if not self._told:
            return self._start
        if len(self._told) >= self._most:
            return None
        gains = self._gains()
        best = int(np.argmax(gains))
        return self._specs[best] if gains[best] > self._worth else None

    def tell(self, spec: Spec, sample: IterationTimes) -> None:
        """``spec`` was measured."""
        self._told.append((self._add(spec), sample))
        before = self._best
        mean, _ = self._believed()
        tried = sorted({place for place, _ in self._told})
        self._best = min(tried, key=lambda place: mean[place])
        if self._best != before or len(self._told) == 1:
            self._widen(self._best)

    def _add(self, spec: Spec, time: float | None = None) -> int:
        key = str(Spec(spec.name, spec.settings))
        if key not in self._pool:
            self._pool[key] = len(self._specs)
            self._specs.append(spec)
            self._logs.append(math.log(self._forecast(spec) if time is None else time))
            self._points.append(self._space.point(spec))
        return self._pool.setdefault(str(spec), self._pool[key])

    def _widen(self, place: int) -> None:
        """Add the neighbours of the best to the pool."""
        for knob in self._space.free:
            for stride in _STRIDES:
                for near in self._space.neighbours(self._specs[place], knob, stride):
                    self._add(near)

    def _lesson(self, place: int, sample: IterationTimes) -> Correction:
        error = max(sample.error / sample.time, _QUIET)
        return Correction(self._specs[place], math.log(sample.time) - self._logs[place], error)

    def _believed(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Expected logarithms of the times of all of the pool, and their covariance."""
        points = np.array(self._points).reshape(len(self._specs), -1)
        alike = _WRONG**2 * _alike(points, points)
        prior, forecast = _LEVEL**2 + alike, np.array(self._logs)
        lessons = self.learnt
        if not lessons:
            return forecast, prior
        tried = [self._pool[str(each.spec)] for each in lessons]
        ages = np.array([each.age for each in lessons])
        # A constant prior mean would shrink the level towards the forecast's; beside `_LEVEL` it does so by nothing.
        cross = alike[:, tried] * _LASTING**ages + _LEVEL**2 * (ages == 0)
        apart = np.abs(ages[:, None] - ages)
        between = alike[np.ix_(tried, tried)] * _LASTING**apart + _LEVEL**2 * (apart == 0)
        noise = np.diag([each.error**2 for each in lessons])
        weights = np.linalg.solve(between + noise, cross.T).T.astype(np.float64)
        return forecast + weights @ np.array([each.off for each in lessons]), prior - weights @ cross.T

    def _gains(self) -> NDArray[np.float64]:
        """Return the expected improvement of each of the pool over the best, as a share."""
        mean, covariance = self._believed()
        variance = np.diag(covariance)
        spread = np.sqrt(np.maximum(variance + variance[self._best] - 2 * covariance[self._best], 1e-18))
        less = mean[self._best] - mean
        ratio = less / spread
        return less * _below(ratio) + spread * np.exp(-(ratio**2) / 2) / math.sqrt(2 * math.pi)


def _alike(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    apart = ((one[:, None] - other[None]) ** 2).sum(axis=2)
    return np.exp(-apart / (2 * _NEAR**2))


def _below(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The normal distribution."""
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in values])


_AGAIN = 24
"""Simulations of a search in a running job, which waits for it."""
_FURTHEST = 64.0
"""Factor by which a link may have become faster or slower."""
_HALVINGS = 8


class JobForecaster:
    """Forecasts of ``workload`` on ``place`` under ``plan``, whose free knobs are searched.

    ``earlier``: what is known first is of an earlier run; ``place`` is as it is now.
    """

    def __init__(self, workload: Workload, place: Place, plan: Spec, *, earlier: bool = False) -> None:
        self._workload, self.place, self._plan, self._earlier = workload, place, plan, earlier
        self._times: dict[str, float] = {}
        self._latest: SimulatorPrior | None = None
        self._careful = False

    def forecast(self, spec: Spec) -> float:
        """Seconds of an iteration."""
        key = str(spec)
        if key not in self._times:
            self._times[key] = self._on(self.place, spec)
        return self._times[key]

    def informed(self, start: Spec | None = None, *, evaluations: int = 60, careful: bool = False) -> SimulatorPrior:
        """Return a proposer that begins with ``start``, or with the best by what is forecast and was learnt.

        Later ones are as ``careful`` as the first; see `foretrain.planner.tune`.
        """
        self._careful |= careful
        tried: list[tuple[Spec, Time]] = []
        best = tune(self._workload, self.place, self._plan, evaluations=evaluations, careful=self._careful, tried=tried)
        known = [(spec, to_seconds(time)) for spec, time in tried]
        self._times.update((str(spec), time) for spec, time in known)
        space = Space.of(self._plan, self._workload, running=True)
        learnt = self._latest.learnt if self._latest is not None else ()
        start = start or (None if learnt else best)
        self._latest = SimulatorPrior(space, self.forecast, known, start, learnt)
        return self._latest

    def again(self, spec: Spec, before: IterationTimes, now: IterationTimes) -> SimulatorPrior:
        """Return a proposer for the changed job: the link is as fast as makes ``spec`` take what it takes now.

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
