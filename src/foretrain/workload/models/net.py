"""Model builder: a model is written down as its forward pass; shapes, parameters, costs and layer times follow.

Operators come in execution order, parameters in registration order (the order of ``module.parameters()``). The two
agree unless a model registers a module before it runs; `Net.declare` says so. Where a model branches, the branches
run one after the other in the order of the published forward function, which is a topological order.

What has no parameters (ReLU, pooling, softmax, residual sums) is folded into the operator it follows, so that the
times of all operators add up to the whole step. Everything is counted per sample, in numbers and not in bytes: a net
knows neither batch nor precision nor device.

# Note [Operator costs]
A kernel takes max(2·macs·batch / achieved FLOP/s, bytes / (0.8·bandwidth)) plus a launch. The optimizer streams its
state through memory once. All parameters of a layer are released together, when the layer's backward pass ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, TypeAlias

from foretrain.device import Device, Precision, element_size
from foretrain.errors import ConfigError
from foretrain.units import SECOND, Time
from foretrain.workload.step import Gradient, Layer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from foretrain.device import Kind


@dataclass(frozen=True, slots=True)
class LayerKernel:
    """Kernel launch on the device.

    Attributes:
        kind: what bounds it.
        macs: multiply-accumulates per sample; 2 FLOPs each.
        moved: numbers read and written per sample.
        fixed: numbers read and written whatever the batch, such as weights.
    """

    kind: Kind
    macs: int = 0
    moved: int = 0
    fixed: int = 0


@dataclass(frozen=True, slots=True)
class Parameter:
    """Parameter tensor; ``operator`` is the index of the operator that uses it first."""

    name: str
    shape: tuple[int, ...]
    operator: int

    @property
    def elements(self) -> int:
        """Return how many numbers it holds."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ModelLayer:
    """Layer: its kernels in the forward and in the backward pass."""

    name: str
    forward: tuple[LayerKernel, ...]
    backward: tuple[LayerKernel, ...]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A finished net: operators in execution order, parameters in registration order."""

    operators: tuple[ModelLayer, ...]
    parameters: tuple[Parameter, ...]

    @property
    def elements(self) -> int:
        """Return how many trainable numbers the model has."""
        return sum(parameter.elements for parameter in self.parameters)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one sample's forward pass."""
        return sum(kernel.macs for operator in self.operators for kernel in operator.forward)


class Net:
    """Builds an `Architecture`. ``shape`` is what flows now, per sample: (channels, height, width) or (tokens, width).

    ``shape`` may be set: a branch begins by setting it back, a concatenation ends by setting it to the sum.
    """

    def __init__(self, *shape: int) -> None:
        self.shape = shape
        self._operators: list[ModelLayer] = []
        # A dict keeps the place of a key that is assigned again: `declare` reserves places, `_owns` fills them.
        self._parameters: dict[str, Parameter | None] = {}

    def declare(self, names: Iterable[str]) -> None:
        """Register parameters that are used later."""
        for name in names:
            self._parameters.setdefault(name)

    def build(self) -> Architecture:
        """Return the finished net."""
        missing = [name for name, parameter in self._parameters.items() if parameter is None]
        assert not missing, f"declared and never used: {missing}"
        return Architecture(tuple(self._operators), tuple(p for p in self._parameters.values() if p is not None))

    # Layers with parameters.

    def conv(
        self,
        name: str,
        out: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
        bias: bool = False,
    ) -> None:
        """Add a convolution over (channels, height, width)."""
        high, wide = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        channels = self.shape[0]
        before = math.prod(self.shape)
        self.shape = (out, *self._slide((high, wide), stride, padding))
        weight = (out, channels, high, wide)
        after = math.prod(self.shape)
        kind: Kind = "winograd" if (high, wide, stride) in ((3, 3, 1), (5, 5, 1)) else "conv"
        macs = math.prod(self.shape[1:]) * math.prod(weight)
        self._layer(name, LayerKernel(kind, macs, before + after, math.prod(weight)))
        self._owns(name, weight=weight, bias=(out,) if bias else None)

    def linear(self, name: str, out: int, bias: bool = True, tied: bool = False) -> None:
        """Add a product of the last axis with a matrix; ``tied`` when the matrix is another layer's parameter."""
        *rows, width = self.shape
        self.shape = (*rows, out)
        rows_times = math.prod(rows)
        kernel = LayerKernel("gemm", rows_times * width * out, rows_times * (width + out), width * out)
        self._layer(name, kernel)
        if not tied:
            self._owns(name, weight=(out, width), bias=(out,) if bias else None)

    def batch_norm(self, name: str) -> None:
        """Add a norm over all samples of a channel: one read, one write.

        The statistics cost no third pass where a kernel keeps the channel on chip; published image rates, of fused
        kernels, are met with two passes and missed by a fifth with three.
        """
        self._norm(name, passes=2, features=self.shape[0], bias=True)

    def layer_norm(self, name: str, bias: bool = True) -> None:
        """Add a norm over the last axis, which fits into on-chip memory: one read, one write."""
        self._norm(name, passes=2, features=self.shape[-1], bias=bias)

    def embedding(self, name: str, rows: int, width: int, tied: bool = False) -> None:
        """Add a look-up of one row for each token of ``shape[0]``; the gradient is dense, PyTorch's default."""
        self.shape = (self.shape[0], width)
        looked_up = math.prod(self.shape)
        backward = LayerKernel("memory", moved=3 * looked_up, fixed=rows * width)
        self._operators.append(ModelLayer(name, (LayerKernel("memory", moved=2 * looked_up),), (backward,)))
        if not tied:
            self._owns(name, weight=(rows, width), bias=None)

    # What is folded into the operator before it.

    def elementwise(self, passes: int) -> None:
        """Read and write the current tensor ``passes`` times: 2 for an activation in place, 3 for a sum."""
        self._fold(LayerKernel("memory", moved=passes * math.prod(self.shape)))

    def pool(self, kernel: int, stride: int = 1, padding: int = 0) -> None:
        """Add a maximum or average over a window."""
        before = math.prod(self.shape)
        self.shape = (self.shape[0], *self._slide((kernel, kernel), stride, padding))
        self._fold(LayerKernel("memory", moved=before + math.prod(self.shape)))

    def flatten(self, height: int = 1, width: int = 1) -> None:
        """Average adaptively to ``height`` × ``width``, then flattens."""
        before = math.prod(self.shape)
        self.shape = (self.shape[0] * height * width,)
        self._fold(LayerKernel("memory", moved=before + self.shape[0]))

    def attention(self, heads: int, width: int, keys: int, fused: bool = False) -> None:
        """Add scores, softmax and weighted sum of ``shape[0]`` queries over ``keys`` keys.

        ``fused`` never writes the scores to memory and skips the masked half (FlashAttention, causal); otherwise the
        scores are scaled, masked, normalized and dropped out, each a pass of read and write.
        """
        queries = self.shape[0]
        self.shape = (queries, width)
        product = queries * keys * width
        if fused:
            self._fold(LayerKernel("gemm", product, 2 * (queries + keys) * width))
        else:
            scores = heads * queries * keys
            self._fold(LayerKernel("gemm", product, (queries + keys) * width + scores))
            self._fold(LayerKernel("memory", moved=8 * scores))
            self._fold(LayerKernel("gemm", product, (queries + keys) * width + scores))

    # The bookkeeping.

    def _slide(self, kernel: tuple[int, int], stride: int, padding: int | tuple[int, int]) -> tuple[int, ...]:
        paddings = padding if isinstance(padding, tuple) else (padding, padding)
        axes = zip(self.shape[1:], kernel, paddings, strict=True)
        return tuple((size + 2 * pad - window) // stride + 1 for size, window, pad in axes)

    def _norm(self, name: str, passes: int, features: int, bias: bool) -> None:
        self._layer(name, LayerKernel("memory", moved=passes * math.prod(self.shape), fixed=2 * features))
        self._owns(name, weight=(features,), bias=(features,) if bias else None)

    def _layer(self, name: str, kernel: LayerKernel) -> None:
        # Backward is twice forward: a gradient for the input and one for the weight, each as large as the forward
        # pass. Nothing asks for the gradient of the data itself, so the first layer of all does only the second.
        self._operators.append(ModelLayer(name, (kernel,), (kernel,) * (2 if self._operators else 1)))

    def _fold(self, kernel: LayerKernel) -> None:
        last = self._operators[-1]
        folded = ModelLayer(last.name, (*last.forward, kernel), (*last.backward, kernel, kernel))
        self._operators[-1] = folded

    def _owns(self, name: str, weight: tuple[int, ...], bias: tuple[int, ...] | None) -> None:
        for suffix, shape in (("weight", weight), ("bias", bias)):
            if shape is not None:
                full = f"{name}.{suffix}"
                assert self._parameters.get(full) is None, f"{full} appears twice"
                self._parameters[full] = Parameter(full, shape, len(self._operators) - 1)


Optimizer: TypeAlias = Literal["sgd", "adam"]

_UPDATE_BYTES: dict[Optimizer, int] = {"sgd": 20, "adam": 28}
"""Bytes moved per parameter: weight and states (one for momentum, two for Adam) read and written in fp32, gradient
read. Half precision moves as much: it saves two bytes of gradient and writes a half copy of the weight."""


def layers_of(
    net: Architecture, device: Device, precision: Precision, batch: int, optimizer: Optimizer
) -> tuple[Layer, ...]:
    """Return the operators of ``net`` with their times."""
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
    """Scale all layer times by one factor, so that a step alone does ``throughput`` samples/s."""
    step = sum(layer.forward + layer.backward + layer.update for layer in layers)
    factor = batch / throughput * SECOND / step
    if factor * step < 1000 * len(layers):
        raise ConfigError("throughput", throughput, "leaves no time to compute", "write samples per second of one GPU")

    def scaled(time: Time) -> Time:
        return round(time * factor)

    return tuple(Layer(x.name, scaled(x.forward), scaled(x.backward), scaled(x.update)) for x in layers)


def gradients_of(net: Architecture, layers: Sequence[Layer], precision: Precision) -> tuple[Gradient, ...]:
    """Return a gradient for each parameter, in registration order; a tied one belongs to its first use."""
    size = element_size(precision)
    released = list(accumulate(layer.backward for layer in reversed(layers)))[::-1]
    return tuple(
        Gradient(parameter.name, size * parameter.elements, parameter.operator, released[parameter.operator])
        for parameter in net.parameters
    )
