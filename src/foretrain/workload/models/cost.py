"""From an architecture to a workload: what each operator costs on a device, and when each gradient is complete.

A kernel takes max(2·macs·batch / achieved FLOP/s, bytes / (0.8·bandwidth)) plus a launch. The optimizer streams its
state through memory once. All parameters of a layer are released together, when the layer's backward pass ends.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Literal, TypeAlias

from foretrain.device import Device, Precision, element_size
from foretrain.errors import ConfigError
from foretrain.units import SECOND, Time
from foretrain.workload.step import Gradient, Layer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretrain.workload.models.net import Architecture, LayerKernel

Optimizer: TypeAlias = Literal["sgd", "adam"]

_UPDATE_BYTES: dict[Optimizer, int] = {"sgd": 20, "adam": 28}
"""Bytes moved per parameter: weight and states (one for momentum, two for Adam) read and written in fp32, gradient
read. Half precision moves as much: it saves two bytes of gradient and writes a half copy of the weight."""


def layers_of(
    net: Architecture, device: Device, precision: Precision, batch: int, optimizer: Optimizer
) -> tuple[Layer, ...]:
    """The operators of ``net`` with their times."""
    size = element_size(precision)

    def total(kernels: Sequence[LayerKernel]) -> Time:
        return sum(
            device.time(
                kernel.kind,
                precision,
                flops=2 * kernel.macs * batch,
                moved=size * (kernel.moved * batch + kernel.fixed),
            )
            for kernel in kernels
        )

    owned = [0] * len(net.operators)
    for parameter in net.parameters:
        owned[parameter.operator] += parameter.elements
    return tuple(
        Layer(
            operator.name,
            total(operator.forward),
            total(operator.backward),
            device.time("memory", precision, moved=_UPDATE_BYTES[optimizer] * elements) if elements else 0,
        )
        for operator, elements in zip(net.operators, owned, strict=True)
    )


def rescaled(layers: Sequence[Layer], batch: int, throughput: float) -> tuple[Layer, ...]:
    """The same layers, all faster or slower by one factor, so that a step alone does ``throughput`` samples/s."""
    step = sum(layer.forward + layer.backward + layer.update for layer in layers)
    factor = batch / throughput * SECOND / step
    if factor * step < 1000 * len(layers):
        raise ConfigError("throughput", throughput, "leaves no time to compute", "write samples per second of one GPU")

    def scaled(time: Time) -> Time:
        return round(time * factor)

    return tuple(Layer(x.name, scaled(x.forward), scaled(x.backward), scaled(x.update)) for x in layers)


def gradients_of(net: Architecture, layers: Sequence[Layer], precision: Precision) -> tuple[Gradient, ...]:
    """One gradient per parameter, in registration order; a tied one belongs to its first use."""
    size = element_size(precision)
    released = list(accumulate(layer.backward for layer in reversed(layers)))[::-1]
    return tuple(
        Gradient(parameter.name, size * parameter.elements, parameter.operator, released[parameter.operator])
        for parameter in net.parameters
    )
