"""Float8 tensor parallel layers whose collectives travel beside their products, as Inductor's AsyncTP makes them.

What is gathered before a product goes part by part, each a rank's own; what is summed up after one likewise, each for a
rank. Inductor does so where the collective is the product's only neighbour, so not for the gradient of an input that
several layers share, which is the sum of their products. PyTorch sends parts by copies between memories of two GPUs
(``torch.distributed._symmetric_memory``); here they are broadcast and reduced, which puts as many bytes on each link.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from float8 import BACKWARD, FORWARD, quantize
from float8_parallel import Columns, Rows, gradients, product
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

# Operators of their own, so that a compiler leaves alone what is inside.


@torch.library.custom_op("accuracy::gather_multiply", mutates_args=())
def gather_multiply(
    own: Tensor, inverse: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], name: str, dtype: torch.dtype
) -> list[Tensor]:
    """The parts of all ranks, one below the other, and the products of all with each weight, transposed."""
    group = _resolve_process_group(name)
    ranks = group.size()
    whole = own.new_empty(ranks * own.shape[0], own.shape[1])
    parts = whole.chunk(ranks)
    parts[group.rank()].copy_(own)
    works = [
        dist.broadcast(part.view(torch.uint8), group=group, group_src=rank, async_op=True)
        for rank, part in enumerate(parts)
    ]
    products = [own.new_empty(whole.shape[0], weight.shape[0], dtype=dtype) for weight in weights]
    for work, part, *results in zip(works, parts, *(one.chunk(ranks) for one in products), strict=True):
        work.wait()
        for weight, scale, result in zip(weights, scales, results, strict=True):
            torch._scaled_mm(part, weight.t(), scale_a=inverse, scale_b=scale, out_dtype=dtype, out=result)
    return [whole, *products]


@gather_multiply.register_fake
def _(own, inverse, weights, scales, name, dtype):
    rows = own.shape[0] * _resolve_process_group(name).size()
    products = [own.new_empty(rows, weight.shape[0], dtype=dtype) for weight in weights]
    return [own.new_empty(rows, own.shape[1]), *products]


@torch.library.custom_op("accuracy::multiply_scatter", mutates_args=())
def multiply_scatter(
    x: Tensor, inverse: Tensor, weight: Tensor, scale: Tensor, name: str, dtype: torch.dtype
) -> Tensor:
    """This rank's part of the sum over ranks of ``x @ weight.T``."""
    group = _resolve_process_group(name)
    whole = x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)
    parts, works = whole.chunk(group.size()), []
    for rank, (rows, part) in enumerate(zip(x.chunk(group.size()), parts, strict=True)):
        torch._scaled_mm(rows, weight.t(), scale_a=inverse, scale_b=scale, out_dtype=dtype, out=part)
        works.append(dist.reduce(part, group=group, group_dst=rank, async_op=True))
    for work in works:
        work.wait()
    return parts[group.rank()].clone()


@multiply_scatter.register_fake
def _(x, inverse, weight, scale, name, dtype):
    return x.new_empty(x.shape[0] // _resolve_process_group(name).size(), weight.shape[0], dtype=dtype)


def _rows(x: Tensor) -> Tensor:
    """Of (batch, sequence, dim), with the sequence outside, so that a rank's part of it is one block."""
    return x.movedim(1, 0).flatten(0, 1)


def _sequences(rows: Tensor, batch: int) -> Tensor:
    return rows.unflatten(0, (-1, batch)).movedim(0, 1)


def _own(x: Tensor, dtype: torch.dtype, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """The rows of ``x`` in float8, and the inverse of the scale that all ranks agree on."""
    largest = funcol.all_reduce(x.abs().max().float(), "max", group)
    inverse = largest.clamp(min=1e-12) / torch.finfo(dtype).max
    return (_rows(x).float() / inverse).to(dtype), inverse


class _GatherMultiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup, *both: Tensor) -> tuple[Tensor, ...]:
        given = both[len(both) // 2 :]
        ctx.group, ctx.batch, ctx.dtype = group, x.shape[0], x.dtype
        own, inverse = _own(x, FORWARD, group)
        weights, scales = zip(*(quantize(one, FORWARD, "tensorwise") for one in given), strict=True)
        whole, *products = gather_multiply(own, inverse, weights, scales, group.group_name, x.dtype)
        ctx.save_for_backward(whole, inverse, *given)
        return tuple(_sequences(one, x.shape[0]) for one in products)

    @staticmethod
    def backward(ctx, *of_products: Tensor) -> tuple[Tensor | None, ...]:
        whole, inverse, *given = ctx.saved_tensors
        of_inputs, of_weights = [], []
        for gradient, weight in zip(of_products, given, strict=True):
            g8, of_g = quantize(_rows(gradient), BACKWARD, "tensorwise")
            of_input, of_weight = gradients(g8, of_g, whole, inverse, weight, ctx.dtype)
            of_inputs.append(of_input)
            of_weights.append(of_weight)
        own = funcol.reduce_scatter_tensor(sum(of_inputs[1:], of_inputs[0]), "sum", 0, ctx.group)
        return _sequences(own, ctx.batch), None, *of_weights, *(None for _ in given)


class _MultiplyScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, given: Tensor, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, given)
        ctx.group, ctx.dtype = group, weight.dtype
        x8, of_x = quantize(_rows(x), FORWARD, "tensorwise")
        w8, of_w = quantize(given, FORWARD, "tensorwise")
        return _sequences(multiply_scatter(x8, of_x, w8, of_w, group.group_name, x.dtype), x.shape[0])

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, given = ctx.saved_tensors
        own, of_g = _own(gradient, BACKWARD, ctx.group)
        w8, of_w = quantize(given, FORWARD, "tensorwise")
        turned = w8.t().contiguous()
        whole, of_input = gather_multiply(own, of_g, [turned], [of_w], ctx.group.group_name, ctx.dtype)
        x8, of_x = quantize(_rows(x), FORWARD, "tensorwise")
        of_weight = product(whole.t().contiguous(), of_g, x8.t().contiguous(), of_x, ctx.dtype)
        return _sequences(of_input, x.shape[0]), of_weight, None, None


class AsyncColumns(Columns):
    """Takes the products that `GatherAndMultiply` hands it, of which one is its own."""

    place: int

    def forward(self, input: tuple[Tensor, ...]) -> Tensor:  # noqa: A002 (nn.Linear's name)
        return input[self.place]


class AsyncRows(Rows):
    """Sums its output up while it multiplies."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.Linear's name)
        return _MultiplyScatter.apply(input, *self.both, self.group)


class GatherAndMultiply(ParallelStyle):
    """Gathers the first argument of a module, and multiplies it by the weights of the layers of these names."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        layers = [module.get_submodule(name) for name in self.names]
        for place, layer in enumerate(layers):
            layer.place = place

        def multiply(_: nn.Module, inputs: tuple) -> tuple:
            x = inputs[0].to_local() if isinstance(inputs[0], DTensor) else inputs[0]
            weights, given = zip(*(layer.both for layer in layers), strict=True)
            return _GatherMultiply.apply(x, group, *weights, *given), *inputs[1:]

        module.register_forward_pre_hook(multiply)
        return module
