"""Loss tolerance of a model: trainings at every p of a grid, compared with those of the same seeds at p = 0.

# Note [Non-inferiority]
Accuracy under loss is compared by a one-sided paired t test against a margin.
With d = accuracy with losses − accuracy without, of the same seed, the hypothesis is that the mean is worse: at most
−margin. It is rejected at level α if d̄ − t(1 − α, n − 1)·s/√n, the lower end of the interval of level 1 − 2α, is above
−margin: the usual test of non-inferiority (Wellek, *Testing Statistical Hypotheses of Equivalence and Noninferiority*,
2010). Without a margin nothing could be shown to be as good, and a plain test for a difference would take few seeds for
a proof that there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median, stdev
from typing import Any

from foretrain.errors import ConfigError, RecordError
from foretrain.loss_tolerance.losses import check_chance
from foretrain.loss_tolerance.replicas import LossyExchange
from foretrain.loss_tolerance.training import AccuracyCurve, Training
from foretrain.loss_tolerance.trial import build_trial


@dataclass(frozen=True, slots=True)
class Interval:
    """Confidence interval of the mean of paired differences.

    Attributes:
        mean: of all.
        low, high: ends of the interval of level 1 − 2α; NaN where a difference is.
    """

    mean: float
    low: float
    high: float

    def not_worse(self, margin: float) -> bool:
        """Return whether the mean is shown to be above −``margin``."""
        return self.low > -margin


def interval(differences: Sequence[float], alpha: float = 0.05) -> Interval:
    """The interval from at least two paired differences. ConfigError for fewer, or for an impossible ``alpha``."""
    if len(differences) < 2:
        raise ConfigError("seeds", len(differences), "show no spread", "write at least 2, better 5")
    if not 0 < alpha < 0.5:
        raise ConfigError("alpha", alpha, "is no level of a one-sided test", "write e.g. 0.05")
    if not all(map(math.isfinite, differences)):
        return Interval(math.nan, math.nan, math.nan)
    mean = fmean(differences)
    half = student_t(1 - alpha, len(differences) - 1) * stdev(differences) / math.sqrt(len(differences))
    return Interval(mean, mean - half, mean + half)


def student_t(probability: float, freedom: int) -> float:
    """The quantile of Student's t for a ``probability`` of at least a half, by bisection to the last bit."""
    low, high = 0.0, 1.0
    while _below(high, freedom) < probability:
        high *= 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _below(middle, freedom) < probability else (low, middle)
    return low


def _below(t: float, freedom: int) -> float:
    """P(T ≤ t), for whole degrees of freedom a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    odd, cosine = freedom % 2, math.cos(angle)
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for power in range(1 + odd, freedom, 2):
        total += term
        term *= cosine * cosine * power / (power + 1)
    inside = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return 0.5 + inside / 2


GRID = (0.0, 0.005, 0.01, 0.02, 0.035, 0.05, 0.1, 0.2, 0.4)


@dataclass(frozen=True, slots=True)
class ToleranceSettings:
    """Settings of a tolerance measurement.

    Attributes:
        exchange: how ranks exchange gradients.
        grid: shares of each rank's contribution that sums may lose, ascending, the first 0.
        seeds: how many trainings at each p, numbered from 0.
        rounds: of a training; accuracies are compared after as many.
        evaluations: in these rounds, evenly spaced.
        more: how many times the rounds a training may take to catch up.
        margin: the difference in accuracy that does not matter, in the unit of the evaluation.
        alpha: level of the test.
    """

    exchange: LossyExchange = field(default_factory=LossyExchange)
    grid: tuple[float, ...] = GRID
    seeds: int = 5
    rounds: int = 300
    evaluations: int = 20
    more: float = 2.0
    margin: float = 0.01
    alpha: float = 0.05

    def __post_init__(self) -> None:
        for index, p in enumerate(self.grid):
            check_chance(f"grid[{index}]", p)
        if len(self.grid) < 2 or self.grid[0] != 0 or list(self.grid) != sorted(set(self.grid)):
            raise ConfigError("grid", list(self.grid), "does not rise from 0", "write e.g. 0 0.01 0.05 0.2")
        for name, value, least in (("seeds", self.seeds, 2), ("rounds", self.rounds, 1), ("more", self.more, 1)):
            if not value >= least or math.isinf(value):
                raise ConfigError(name, value, f"is below {least}", f"write at least {least}")
        if not self.margin >= 0 or math.isinf(self.margin):
            raise ConfigError("margin", self.margin, "is no difference in accuracy", "write e.g. 0.01")
        if not 1 <= self.evaluations <= self.rounds:
            raise ConfigError("evaluations", self.evaluations, "do not fit the rounds", f"write 1 to {self.rounds}")
        if not 0 < self.alpha < 0.5:
            raise ConfigError("alpha", self.alpha, "is no level of a one-sided test", "write e.g. 0.05")

    @property
    def spacing(self) -> tuple[int, ...]:
        """Rounds between evaluations, in ``rounds`` rounds."""
        marks = [round(self.rounds * i / self.evaluations) for i in range(self.evaluations + 1)]
        return tuple(after - before for before, after in pairwise(marks))


@dataclass(frozen=True, slots=True)
class Level:
    """Trainings at one p.

    Attributes:
        p: share of each rank's contribution that sums may lose; see `foretrain.loss_tolerance.training.drawn`.
        curves: by seed.
        accuracies: after the equal rounds, by seed; NaN where training diverged.
        difference: to the trainings at p = 0 with the same seeds.
        reached: the first evaluated round within the margin of the same seed's final accuracy at p = 0; None if never.
        slower: of these rounds, how many times as many as at p = 0, median over seeds; NaN if any never got there.
        not_worse: whether shown to be at equal rounds.
    """

    p: float
    curves: tuple[AccuracyCurve, ...]
    accuracies: tuple[float, ...]
    difference: Interval
    reached: tuple[int | None, ...]
    slower: float
    not_worse: bool

    @property
    def mean(self) -> float:
        """Return the mean accuracy."""
        return fmean(self.accuracies)

    @property
    def deviation(self) -> float:
        """Standard deviation of the accuracies over seeds."""
        return stdev(self.accuracies) if all(map(math.isfinite, self.accuracies)) else math.nan

    @property
    def lost(self) -> float:
        """Share of the bytes sent, hop by hop, that was lost, mean over seeds."""
        return fmean(curve.lost for curve in self.curves)


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured loss tolerance of a model.

    Attributes:
        settings: what was tried.
        levels: one for each p of the grid.
    """

    settings: ToleranceSettings
    levels: tuple[Level, ...]

    @property
    def tolerable(self) -> float:
        """The largest p at equal rounds: all levels up to it are shown to be not worse.

        Levels are tested in ascending order until the first fails, so no correction for many tests is due (a fixed
        sequence; Maurer, Hothorn and Lehmacher, 1995).
        """
        return _last(self.levels, [level.not_worse for level in self.levels])

    @property
    def with_more_rounds(self) -> float:
        """The largest p up to which every training catches up within the rounds allowed."""
        return _last(self.levels, [None not in level.reached for level in self.levels])

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON; NaN is null."""
        one, way = self.settings, self.settings.exchange
        return {
            "tolerable": self.tolerable,
            "with_more_rounds": self.with_more_rounds,
            "exchange": way.way,
            "back": way.back,
            "small": way.small,
            "gap": way.gap,
            "losses": way.tagging.by,
            "workers": way.ranks,
            "payload": way.payload,
            "rounds": one.rounds,
            "more": one.more,
            "margin": one.margin,
            "alpha": one.alpha,
            "levels": [
                {
                    "p": level.p,
                    "lost": level.lost,
                    "accuracies": level.accuracies,
                    "difference": {
                        "mean": level.difference.mean,
                        "low": level.difference.low,
                        "high": level.difference.high,
                    },
                    "not_worse": level.not_worse,
                    "reached": level.reached,
                    "slower": level.slower,
                    "drift": [curve.drift for curve in level.curves],
                    "curves": [
                        {"rounds": curve.rounds, "accuracies": curve.accuracies} for curve in level.curves
                    ],
                }
                for level in self.levels
            ],
        }  # fmt: skip


def profile(
    build: Callable[[int], object],
    settings: ToleranceSettings,
    *,
    name: str = "build",
    progress: Callable[[str, float, float], None] = lambda what, done, total: None,
) -> Profile:
    """Train at every p with every seed.

    Args:
        build: makes a `Trial`, or what looks like one, from a seed.
        settings: what to try.
        name: of ``build``, for messages.
        progress: told what is trained, rounds done and rounds to come at most.

    Raises:
        RecordError: ``build`` returned something else, or training diverges without any loss.
        ConfigError: batches are too small for the workers.
    """
    curves: list[list[AccuracyCurve]] = [[] for _ in settings.grid]
    meter = _Meter(settings, progress)
    for seed in range(settings.seeds):
        target = -math.inf
        for index, p in enumerate(settings.grid):
            meter.begin(f"p = {p:.1%}, seed {seed}")
            training = Training(build_trial(build, seed, name), settings.exchange, p, seed)
            for rounds in settings.spacing:
                training.advance(rounds, meter.did)
            if p == 0:
                if training.diverged:
                    raise RecordError(f"{name}({seed}) diverges without any loss; lower its learning rate")
                target = training.curve().at(settings.rounds) - settings.margin
            _catch_up(training, settings, target, meter)
            curves[index].append(training.curve())
    levels = (_level(settings, p, own, curves[0]) for p, own in zip(settings.grid, curves, strict=True))
    return Profile(settings, tuple(levels))


def _catch_up(training: Training, settings: ToleranceSettings, target: float, meter: _Meter) -> None:
    """Train on until it is as accurate as without losses, or the rounds are used up."""
    step = max(settings.spacing)
    while training.curve().reaches(target) is None and not training.diverged:
        if training.rounds + step > settings.more * settings.rounds:
            return
        training.advance(step, meter.did)


def _level(
    settings: ToleranceSettings, p: float, curves: Sequence[AccuracyCurve], bases: Sequence[AccuracyCurve]
) -> Level:
    accuracies = tuple(curve.at(settings.rounds) for curve in curves)
    targets = [base.at(settings.rounds) - settings.margin for base in bases]
    reached = tuple(curve.reaches(target) for curve, target in zip(curves, targets, strict=True))
    before = [base.reaches(target) for base, target in zip(bases, targets, strict=True)]
    ratios = [after / first for after, first in zip(reached, before, strict=True) if after and first]
    difference = interval(
        [own - base.at(settings.rounds) for own, base in zip(accuracies, bases, strict=True)], settings.alpha
    )
    slower = median(ratios) if len(ratios) == len(curves) else math.nan
    not_worse = p == 0 or difference.not_worse(settings.margin)
    return Level(p, tuple(curves), accuracies, difference, reached, slower, not_worse)


def _last(levels: Sequence[Level], good: Sequence[bool]) -> float:
    last = 0.0
    for level, one in zip(levels, good, strict=True):
        if not one:
            break
        last = level.p
    return last


class _Meter:
    """Counter of rounds for a bar: those of catching up only where they were used."""

    def __init__(self, settings: ToleranceSettings, progress: Callable[[str, float, float], None]) -> None:
        self._tell, self._each = progress, settings.rounds
        self._left = len(settings.grid) * settings.seeds
        self._what, self._done, self._here = "", 0, 0

    def begin(self, what: str) -> None:
        """Another training begins."""
        self._what, self._here = what, 0
        self._left -= 1

    def did(self, rounds: int) -> None:
        """So many rounds more."""
        self._done += rounds
        self._here += rounds
        rest = max(self._each - self._here, 0)
        self._tell(self._what, self._done, self._done + rest + self._left * self._each)
