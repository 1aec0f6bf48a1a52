"""Tensor and sequence parallel layers that send activations in float8, as torchao's do with scales of whole tensors.

What a layer gathers, its input forward and its output's gradient backward, is quantized before it is sent, by a scale
that all ranks agree on; what it sums up is sent in the dtype that it has. Sequences are split in dimension 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed._functional_collectives as funcol
from float8 import BACKWARD, FORWARD, Float8Linear, quantize
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle


class Gathered(NamedTuple):
    """An activation of whole sequences in float8.

    Attributes:
        anchor: of its shape, without memory; gradients go by way of it.
        values: (tokens, dim) in float8.
        inverse: what to multiply them by.
    """

    anchor: Tensor
    values: Tensor
    inverse: Tensor


def _gathered(x: Tensor, dtype: torch.dtype, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """``x`` (batch, part of the sequence, dim) of all ranks: (tokens, dim) in ``dtype``, and its inverse scale."""
    largest = funcol.all_reduce(x.abs().max().float(), "max", group)
    inverse = largest.clamp(min=1e-12) / torch.finfo(dtype).max
    own = (x.float() / inverse).to(dtype).view(torch.uint8)
    return funcol.all_gather_tensor(own, 1, group).view(dtype).flatten(0, 1), inverse


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
        values, inverse = _gathered(x, FORWARD, group)
        ctx.group = group
        ctx.mark_non_differentiable(values, inverse)
        anchor = x.new_empty(1).expand(x.shape[0], x.shape[1] * group.size(), x.shape[2])
        return anchor, values, inverse

    @staticmethod
    def backward(ctx, gradient: Tensor, *_: Tensor) -> tuple[Tensor, None]:
        return funcol.reduce_scatter_tensor(gradient.contiguous(), "sum", 1, ctx.group), None


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor: Tensor, values: Tensor, inverse: Tensor, weight: Tensor, given: Tensor) -> Tensor:
        ctx.save_for_backward(values, inverse, given)
        ctx.shape, ctx.dtype = anchor.shape, weight.dtype
        w8, of_w = quantize(given, FORWARD, "tensorwise")
        return product(values, inverse, w8, of_w, weight.dtype).unflatten(0, anchor.shape[:-1])

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, Tensor, None]:
        values, inverse, given = ctx.saved_tensors
        g8, of_g = quantize(gradient.flatten(0, 1), BACKWARD, "tensorwise")
        of_input, of_weight = gradients(g8, of_g, values, inverse, given, ctx.dtype)
        return of_input.view(ctx.shape), None, None, of_weight, None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, given: Tensor, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, given)
        ctx.group, ctx.dtype = group, weight.dtype
        x8, of_x = quantize(x.flatten(0, 1), FORWARD, "tensorwise")
        w8, of_w = quantize(given, FORWARD, "tensorwise")
        part = product(x8, of_x, w8, of_w, x.dtype).unflatten(0, x.shape[:2])
        return funcol.reduce_scatter_tensor(part, "sum", 1, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, given = ctx.saved_tensors
        g8, of_g = _gathered(gradient, BACKWARD, ctx.group)
        x8, of_x = quantize(x.flatten(0, 1), FORWARD, "tensorwise")
        of_input, of_weight = gradients(g8, of_g, x8, of_x, given, ctx.dtype)
        return of_input.view(x.shape), of_weight, None, None


def product(a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor, out: torch.dtype) -> Tensor:
    """``a @ b.T`` of (rows, inner) and (columns, inner), both in float8."""
    return torch._scaled_mm(a, b.t(), scale_a=of_a, scale_b=of_b, out_dtype=out)


def gradients(
    g8: Tensor, of_g: Tensor, x8: Tensor, of_x: Tensor, given: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Of a product's input and weight, by its output's (tokens, columns) and its input (tokens, inner)."""
    w8, of_w = quantize(given, FORWARD, "tensorwise")
    of_input = product(g8, of_g, w8.t().contiguous(), of_w, dtype)
    return of_input, product(g8.t().contiguous(), of_g, x8.t().contiguous(), of_x, dtype)


class _SplitLinear(Float8Linear):
    @property
    def both(self) -> tuple[Tensor, Tensor]:
        """This rank's part of the weight, and that in float8 if it was gathered so."""
        weight = _local(self.weight)
        return weight, weight.detach() if self.values is None else self.values


class Columns(_SplitLinear):
    """Its weight is split by columns of the output; takes what `GatherInput` hands it."""

    def forward(self, input: Gathered) -> Tensor:  # noqa: A002 (nn.Linear's name)
        return _Columns.apply(*input, *self.both)


class Rows(_SplitLinear):
    """Its weight is split by columns of the input; its output is split along the sequence."""

    group: ProcessGroup

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.Linear's name)
        return _Rows.apply(input, *self.both, self.group)


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


class Split(ParallelStyle):
    """Makes a `Float8Linear` a `Columns` or `Rows`."""

    def __init__(self, kind: type[Columns] | type[Rows]) -> None:
        self.kind = kind

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.__class__ = self.kind
        module.group = device_mesh.get_group()
        placement: Placement = Shard(0 if issubclass(self.kind, Columns) else 1)

        def split(_name: str, layer: nn.Module, mesh: DeviceMesh) -> None:
            layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [placement]))

        return distribute_module(module, device_mesh, split)


class GatherInput(ParallelStyle):
    """Gathers the first argument of a module, in float8 and once for all its layers."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()

        def gather(_: nn.Module, inputs: tuple) -> tuple:
            x = inputs[0].to_local() if isinstance(inputs[0], DTensor) else inputs[0]
            return Gathered(*_Gather.apply(x, group)), *inputs[1:]

        module.register_forward_pre_hook(gather)
        return module
