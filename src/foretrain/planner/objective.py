"""What an iteration takes, of several that were measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

_NORMAL = 1.4826
"""Standard deviations in a median absolute deviation, where values are normal."""
_FAR = 4.0
"""Standard deviations from the median at which a value is an outlier."""
_TRIM = 0.1
_MEDIAN = math.sqrt(math.pi / 2)
"""How much further a median of normal values is off than their mean."""


class IterationTimes(NamedTuple):
    """Iterations under the same knobs.

    Attributes:
        time: what one takes, in the unit of what was given.
        error: the standard error of that, in the same unit.
        iterations: how many were measured.
    """

    time: float
    error: float
    iterations: int


def robust(times: Sequence[float]) -> IterationTimes:
    """The median of ``times`` without outliers and without a tenth at both ends.

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
