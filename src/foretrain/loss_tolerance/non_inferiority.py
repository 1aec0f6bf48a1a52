"""Whether accuracy under loss is not worse: a one-sided paired t test against a margin.

With d = accuracy with losses − accuracy without, of the same seed, the hypothesis is that the mean is worse: at most
−margin. It is rejected at level α if d̄ − t(1 − α, n − 1)·s/√n, the lower end of the interval of level 1 − 2α, is above
−margin: the usual test of non-inferiority (Wellek, *Testing Statistical Hypotheses of Equivalence and Noninferiority*,
2010). Without a margin nothing could be shown to be as good, and a plain test for a difference would take few seeds for
a proof that there is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from foretrain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Interval:
    """Of the mean of paired differences.

    Attributes:
        mean: of all.
        low, high: ends of the interval of level 1 − 2α; NaN where a difference is.
    """

    mean: float
    low: float
    high: float

    def not_worse(self, margin: float) -> bool:
        """Whether the mean is shown to be above −``margin``."""
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
