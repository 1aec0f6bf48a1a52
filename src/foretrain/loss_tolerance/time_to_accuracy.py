"""Time to accuracy: rounds that a real training needed, at the times that a simulated network takes for each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError
from foretrain.loss_tolerance.training import AccuracyCurve
from foretrain.units import Time


def elapsed(rounds: int, iterations: Sequence[Time] | NDArray[np.integer]) -> Time:
    """ps until the end of so many rounds; ``iterations``, ps each, begin anew where they are fewer."""
    times = [int(time) for time in iterations]
    if not times or min(times) <= 0:
        raise ConfigError("iterations", times[:4], "are no times of iterations", "give at least one, in ps")
    whole, rest = divmod(rounds, len(times))
    return whole * sum(times) + sum(times[:rest])


def timed(curve: AccuracyCurve, iterations: Sequence[Time] | NDArray[np.integer]) -> list[tuple[Time, float]]:
    """The curve over time: (ps, accuracy)."""
    return [(elapsed(number, iterations), one) for number, one in zip(curve.rounds, curve.accuracies, strict=True)]


def time_to_accuracy(
    curve: AccuracyCurve, iterations: Sequence[Time] | NDArray[np.integer], accuracy: float
) -> Time | None:
    """ps until the first evaluation with at least ``accuracy``; None if there is none."""
    number = curve.reaches(accuracy)
    return None if number is None else elapsed(number, iterations)
