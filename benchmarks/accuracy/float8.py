"""Linear layers whose three products run in float8, as torchao and Transformer Engine compute them.

Forward, gradient of the input and gradient of the weight are each one ``torch._scaled_mm``; what comes from the
forward pass is e4m3, gradients are e5m2 (Micikevicius et al., FP8 formats for deep learning, 2022). Scales are those of
the tensor at hand ("dynamic", "current scaling"), of the whole tensor or of each row of a product.

With scales of whole tensors, `gather_in_float8` lets FSDP2 cast the shards and gather them in float8, as torchtitan's
presets do (``enable_fsdp_float8_all_gather``).
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard

Scaling = Literal["tensorwise", "rowwise"]
FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


def quantize(x: Tensor, dtype: torch.dtype, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """``x`` of shape (rows, columns) in ``dtype``, and what to multiply it by: a number, or one for each row."""
    if x.dtype == FORWARD:
        return x, torch.ones((), device=x.device)
    largest = x.abs().amax(-1, keepdim=True) if scaling == "rowwise" else x.abs().max()
    inverse = largest.float().clamp(min=1e-12) / torch.finfo(dtype).max
    return (x.float() / inverse).to(dtype), inverse


def ready(x: Tensor, dtype: torch.dtype, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """`quantize`, row by row in memory."""
    return quantize(x.contiguous(), dtype, scaling)


def fuse() -> None:
    """Lets the compiler make one kernel of `ready`, for which Transformer Engine has one."""
    globals()["ready"] = torch.compile(ready, recompile_limit=64)


def product(a: Tensor, b: Tensor, kinds: tuple[torch.dtype, torch.dtype], scaling: Scaling, out: torch.dtype) -> Tensor:
    """``a @ b.T`` of (rows, inner) and (columns, inner): the one layout that Hopper's float8 matrix units take."""
    a8, by_row = ready(a, kinds[0], scaling)
    b8, by_column = ready(b, kinds[1], scaling)
    return torch._scaled_mm(a8, b8.t(), scale_a=by_row, scale_b=by_column.t(), out_dtype=out)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, values: Tensor, scaling: Scaling) -> Tensor:
        ctx.save_for_backward(x, values)
        ctx.scaling, ctx.dtype = scaling, weight.dtype
        return product(x, values, (FORWARD, FORWARD), scaling, x.dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, values = ctx.saved_tensors
        of_input = product(gradient, values.t(), (BACKWARD, FORWARD), ctx.scaling, x.dtype)
        of_weight = product(gradient.t(), x.t(), (BACKWARD, FORWARD), ctx.scaling, ctx.dtype)
        return of_input, of_weight, None, None


def multiply(x: Tensor, weight: Tensor, scaling: Scaling, values: Tensor | None = None) -> Tensor:
    """``x @ weight.T`` in float8, for x of any number of dimensions; ``values`` is the weight in float8, if that is
    there."""
    given = weight.detach() if values is None else values
    return _Product.apply(x.flatten(0, -2), weight, given, scaling).unflatten(0, x.shape[:-1])


class Float8Linear(nn.Linear):
    """A linear layer that multiplies in float8; its parameters stay as they were.

    A weight that `parallelize_module` has split is multiplied where it lies, with activations that were gathered in
    the dtype that they have; float8_parallel.py gathers them in float8.
    """

    scaling: Scaling = "tensorwise"
    values: Tensor | None = None
    """The weight that FSDP2 has gathered in float8."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.Linear's name)
        weight = self.weight
        if not isinstance(weight, DTensor):
            output = multiply(input, weight, self.scaling, self.values)
            return output if self.bias is None else output + self.bias
        assert isinstance(input, DTensor)
        assert self.bias is None, "split layers have no bias here"
        columns = weight.placements[0] == Shard(0)
        local = input.to_local(grad_placements=[Partial()] if columns else input.placements)
        output = multiply(local, weight.to_local(), self.scaling, self.values)
        return DTensor.from_local(output, input.device_mesh, [Shard(output.ndim - 1) if columns else Partial()])


def convert(module: nn.Module, scaling: Scaling) -> None:
    """Makes every linear layer below ``module`` whose sides are multiples of 16 a `Float8Linear`, in place."""
    for layer in module.modules():
        if type(layer) is nn.Linear and not any(side % 16 for side in layer.weight.shape):
            layer.__class__ = Float8Linear
            layer.scaling = scaling


class _Whole(Tensor):
    """What FSDP2 gets as a gathered weight: its shape and dtype without memory; gradients go by way of it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.as_strided:
            return args[0].as_subclass(Tensor)
        return super().__torch_function__(function, types, args, kwargs)


def gather_in_float8(module: nn.Module) -> None:
    """Has FSDP2 gather the weights of every `Float8Linear` below ``module`` in float8; they must be shards on a device.

    See "FSDP2 all-gather extensions" in PyTorch. Scales are 1 here: those that all ranks agree on come for all weights
    of a step by one message.
    """
    for layer in module.modules():
        if isinstance(layer, Float8Linear):
            shard = layer.weight._local_tensor
            shard.fsdp_pre_all_gather = partial(_shard_in_float8, shard.detach())
            shard.fsdp_post_all_gather = _gathered


def _shard_in_float8(
    shard: Tensor, mesh, outer_size, outer_stride, module, mp_policy
) -> tuple[tuple[Tensor], nn.Module]:
    bound = torch.finfo(FORWARD).max
    return (shard.clamp(-bound, bound).to(FORWARD),), module


def _gathered(outputs: tuple[Tensor], module: nn.Module, dtype: torch.dtype, *, out: Tensor | None = None):
    if out is not None:
        return None
    (module.values,) = outputs
    return outputs[0].new_empty((), dtype=dtype).expand_as(outputs[0]).as_subclass(_Whole), ()
