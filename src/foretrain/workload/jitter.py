"""The same step with other times: what a forecast is worth whose layer times are not exact."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from dataclasses import replace
from itertools import accumulate

from foretrain.errors import ConfigError
from foretrain.units import Time
from foretrain.workload.step import Workload

_MOST = 1.0
"""A sigma above it says nothing any more about the step it started from."""


def jittered(workload: Workload, sigma: float, seed: int) -> Workload:
    """``workload`` with each layer's forward, backward and update time multiplied by its own log-normal factor.

    A factor is exp(σz − σ²/2) with z from N(0, 1): its mean is 1, its relative spread about ``sigma``. Every iteration
    has the same times, so this is what is unknown about a step, not what varies from step to step. Gradients are
    released where they were in their layer's backward time. The same seed gives the same step everywhere, so schedules
    and clusters that share a seed are compared on the same step.

    Args:
        workload: one worker's step.
        sigma: 0 to 1; 0 changes nothing.
        seed: of the factors.

    Raises ConfigError for a sigma out of range.
    """
    check_sigma(sigma)
    if not sigma:
        return workload
    chance = random.Random(seed)

    def varied(time: Time) -> Time:
        return math.ceil(time * math.exp(sigma * chance.gauss(0, 1) - sigma * sigma / 2))

    layers = tuple(
        replace(one, forward=varied(one.forward), backward=varied(one.backward), update=varied(one.update))
        for one in workload.layers
    )
    before = list(accumulate(layer.backward for layer in reversed(workload.layers)))
    after = list(accumulate(layer.backward for layer in reversed(layers)))
    gradients = tuple(replace(one, release=_moved(one.release, before, after)) for one in workload.gradients)
    source = f"{workload.source}, jitter {sigma:g} of seed {seed}".removeprefix(", ")
    return replace(workload, layers=layers, gradients=gradients, source=source)


def check_sigma(sigma: object) -> None:
    """Raises ConfigError for what `jittered` does not take."""
    if isinstance(sigma, bool) or not isinstance(sigma, int | float) or not 0 <= sigma <= _MOST:
        raise ConfigError("jitter", sigma, "is no spread from 0 to 1", "write e.g. 0.03")


def _moved(time: Time, before: list[Time], after: list[Time]) -> Time:
    """Where ``time`` of the old backward pass is in the new one; both as the ends of layers' shares of it."""
    index = bisect_left(before, time)
    old, new = (before[index - 1], after[index - 1]) if index else (0, 0)
    if before[index] == old:
        return new
    return new - (-(time - old) * (after[index] - new) // (before[index] - old))
