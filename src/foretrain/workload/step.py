"""What one training step is: layers that compute and gradients that must be exchanged.

t = 0 is the moment the backward pass begins (knowledge of the field counts from there): a gradient's ``release`` is
counted from it. The forward pass that follows belongs to the *next* step and needs the updated parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from foretrain.errors import ConfigError
from foretrain.units import Time, exact_time


@dataclass(frozen=True, slots=True)
class Layer:
    """One piece of computation, in forward order: ``forward``, ``backward`` and ``update`` in picoseconds."""

    name: str
    forward: Time
    backward: Time
    update: Time = 0


@dataclass(frozen=True, slots=True)
class Gradient:
    """One parameter tensor's gradient.

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
    """One training step of one worker.

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
        """The same step on a worker that computes ``factor`` times as long; times round up."""
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
