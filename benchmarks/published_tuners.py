"""Tuners to compare with: random search, and Bayesian optimisation as published.

`foretrain.planner.simulator_prior` is ours, which begins with the simulator's forecasts.
"""

from __future__ import annotations

import random
import warnings
from typing import TYPE_CHECKING

from foretrain.errors import ConfigError
from foretrain.planner.search import IterationTimes, Space
from foretrain.schedule import Spec

if TYPE_CHECKING:
    import optuna

PUBLISHED = 15
"""Samples of ByteScheduler's tuner (its source): so many in all."""
_BEGIN = 10
"""Of these at random."""


class MeasuredProposer:
    """The best of what was measured, by its lowest time alone. Begins with ``start``, and takes ``most`` samples."""

    def __init__(self, space: Space, start: Spec, most: int) -> None:
        self._space, self._most = space, most
        self._told: list[tuple[Spec, IterationTimes]] = []
        self._start = start

    @property
    def best(self) -> Spec:
        """The one that took least."""
        return min(self._told, key=lambda told: told[1].time)[0] if self._told else self._start

    def tell(self, spec: Spec, sample: IterationTimes) -> None:
        """``spec`` was measured."""
        self._told.append((spec, sample))


class RandomSearch(MeasuredProposer):
    """Points at random."""

    def __init__(self, space: Space, start: Spec, most: int = PUBLISHED, seed: int = 0) -> None:
        super().__init__(space, start, most)
        self._source = random.Random(seed)

    def ask(self) -> Spec | None:
        """The next one."""
        return self._space.random(self._source) if len(self._told) < self._most else None


class Bayesian(MeasuredProposer):
    """Gaussian processes, ten points at random and then five by expected improvement (SOSP 2019, 5.3).

    It is optuna's, which takes log expected improvement and knows nothing of the simulator. Sizes and times are floats
    with logarithms; integers would make it 80 × slower.
    """

    def __init__(
        self, space: Space, start: Spec, most: int = PUBLISHED, seed: int = 0, *, at_random: int = _BEGIN
    ) -> None:
        super().__init__(space, start, most)
        try:
            import optuna
        except ModuleNotFoundError:
            raise ConfigError("tuner", "bayesian", "needs optuna", "pip install 'foretrain[tune]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.GPSampler(seed=seed, n_startup_trials=at_random)
        self._study = optuna.create_study(sampler=sampler)
        self._asked: dict[str, optuna.Trial] = {}

    def ask(self) -> Spec | None:
        """The next one."""
        if len(self._told) >= self._most:
            return None
        trial = self._study.ask()
        values: dict[str, float] = {}
        for knob in self._space.free:
            if knob.grid:
                values[knob.name] = trial.suggest_categorical(knob.name, list(knob.grid))
            else:
                low, high = self._space.limits(knob)
                suggested = trial.suggest_float(knob.name, low, high, log=True)
                values[knob.name] = self._space.rounded(suggested, knob)
        spec = self._space.at(**values)
        self._asked[str(spec)] = trial
        return spec

    def tell(self, spec: Spec, sample: IterationTimes) -> None:
        """``spec`` was measured."""
        super().tell(spec, sample)
        if (trial := self._asked.pop(str(spec), None)) is not None:
            self._study.tell(trial, sample.time)
