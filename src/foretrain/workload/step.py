"""Training step: layers that compute, gradients to exchange, and random jitter of their times.

t = 0 is the moment the backward pass begins (knowledge of the field counts from there): a gradient's ``release`` is
counted from it. The forward pass that follows belongs to the *next* step and needs the updated parameters.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import accumulate

from foretrain.errors import ConfigError
from foretrain.units import Time, exact_time


@dataclass(frozen=True, slots=True)
class Layer:
    """Layer, in forward order: ``forward``, ``backward`` and ``update`` in picoseconds."""

    name: str
    forward: Time
    backward: Time
    update: Time = 0


@dataclass(frozen=True, slots=True)
class Gradient:
    """Gradient of a parameter tensor.

    Attributes:
        name: the parameter's name, unique in its workload.
        size: bytes to exchange.
        layer: index of the layer that uses the parameter *first* in the forward pass.
        release: picoseconds after the start of the backward pass at which the gradient is complete.
    """

    name: str
    size: int
    layer: int
    release: Time


@dataclass(frozen=True, slots=True)
class Workload:
    """Training step of one worker.

    Attributes:
        name: e.g. ``"resnet50"``.
        batch: samples per GPU and step.
        layers: in the order of first use in the forward pass.
        gradients: in registration order, the order in which DistributedDataParallel sees them.
        unit: what a sample is called (``"images"``, ``"sequences"``).
        source: where the times came from, for people.

    Raises ConfigError when empty, negative, out of range or contradictory.
    """

    name: str
    batch: int
    layers: tuple[Layer, ...]
    gradients: tuple[Gradient, ...]
    unit: str = "samples"
    source: str = ""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("layers", [], "is empty", "a step has at least one layer")
        if not self.gradients:
            raise ConfigError("gradients", [], "is empty", "a step has at least one gradient to exchange")
        if not isinstance(self.batch, int) or isinstance(self.batch, bool) or self.batch < 1:
            raise ConfigError("batch", self.batch, "is not a positive number of samples", "write e.g. 64")
        for index, layer in enumerate(self.layers):
            for field in ("forward", "backward", "update"):
                _check_count(f"layers[{index}].{field}", getattr(layer, field), 0)
        if not self.compute:
            raise ConfigError("layers", self.name, "takes no time at all", "give forward and backward times")
        names: set[str] = set()
        for index, gradient in enumerate(self.gradients):
            where = f"gradients[{index}]"
            _check_count(f"{where}.size", gradient.size, 1)
            _check_count(f"{where}.release", gradient.release, 0)
            if gradient.name in names:
                raise ConfigError(f"{where}.name", gradient.name, "appears twice", "names are unique")
            names.add(gradient.name)
            if not isinstance(gradient.layer, int) or not 0 <= gradient.layer < len(self.layers):
                remedy = f"layers are numbered 0 to {len(self.layers) - 1}"
                raise ConfigError(f"{where}.layer", gradient.layer, "is no layer", remedy)
            if gradient.release > self.backward:
                remedy = f"the backward pass ends at {exact_time(self.backward)}"
                raise ConfigError(
                    f"{where}.release", exact_time(gradient.release), "is after the backward pass", remedy
                )

    @property
    def forward(self) -> Time:
        """Σ forward times."""
        return sum(layer.forward for layer in self.layers)

    @property
    def backward(self) -> Time:
        """Σ backward times."""
        return sum(layer.backward for layer in self.layers)

    @property
    def update(self) -> Time:
        """Σ update times."""
        return sum(layer.update for layer in self.layers)

    @property
    def compute(self) -> Time:
        """Σ forward + Σ backward: the step if communication and the optimizer were free."""
        return self.forward + self.backward

    @property
    def size(self) -> int:
        """Bytes of all gradients."""
        return sum(gradient.size for gradient in self.gradients)

    def slowed(self, factor: float) -> Workload:
        """Return the same step on a worker that computes ``factor`` times as long; times round up."""
        if factor == 1:
            return self

        def longer(time: Time) -> Time:
            return math.ceil(time * factor)

        layers = tuple(
            replace(one, forward=longer(one.forward), backward=longer(one.backward), update=longer(one.update))
            for one in self.layers
        )
        # Not before a rounded backward pass has come so far: a release never comes after its end.
        gradients = tuple(replace(one, release=longer(one.release)) for one in self.gradients)
        return replace(self, layers=layers, gradients=gradients)


def _check_count(field: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(field, value, f"is not a whole number of at least {least}", "times are ps, sizes bytes")


_MOST = 1.0
"""A sigma above it says nothing any more about the step it started from."""


def jittered(workload: Workload, sigma: float, seed: int) -> Workload:
    """Return ``workload`` with each layer's forward, backward and update time multiplied by its own log-normal factor.

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
    """Raise ConfigError for a spread that `jittered` does not take."""
    if isinstance(sigma, bool) or not isinstance(sigma, int | float) or not 0 <= sigma <= _MOST:
        raise ConfigError("jitter", sigma, "is no spread from 0 to 1", "write e.g. 0.03")


def _moved(time: Time, before: list[Time], after: list[Time]) -> Time:
    """Map ``time`` of the old backward pass to the new one; both are given as the ends of layers' shares."""
    index = bisect_left(before, time)
    old, new = (before[index - 1], after[index - 1]) if index else (0, 0)
    if before[index] == old:
        return new
    return new - (-(time - old) * (after[index] - new) // (before[index] - old))
