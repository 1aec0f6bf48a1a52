"""Layers whose products run in float8, as Transformer Engine's do in Megatron, and whole ones as in Composer.

Scales are those of the micro-batch before ("delayed"), so that a tensor is read once: the kernel that makes it float8
also finds its greatest value, and after a norm it is the norm's own. Split weights are cast once in a step. What the
next product needs transposed, since Hopper's units take one layout only, is written along or transposed in float8. Of 4
bits it is always written along, since blocks of the other way have other scales. With a split sequence, activations and
gradients are gathered in float8, at half the bytes; of 4 bits, both ways. See Transformer Engine's
``layernorm_linear.py`` and ``TransformerEngineBaseModule.grad_output_preprocess``.

Departs in that scales come from one micro-batch, not from the greatest of up to 1,024, and in that on CPUs gradients of
weights are added by another operator: on GPUs, as in Transformer Engine, the product itself adds to ``main_grad``
(``fuse_wgrad_accumulation``), for which PyTorch's ``addmm`` stands, which knows float8 on simulated GPUs only.
"""

from __future__ import annotations

from typing import Any

import float4
import torch
from tensor_exchange import Multiply, Pending, done, gather, gather_and_multiply, multiply_and_scatter, total, wait
from torch import Tensor, nn
from transformer_engine_memory import added

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


# `fuse` makes one kernel of each of the three.
def greatest(x: Tensor) -> Tensor:
    """The greatest absolute value of ``x``."""
    return x.abs().amax().float()


def cast(x: Tensor, largest: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """``x`` of shape (rows, columns) in ``kind``, what to multiply it by, and its greatest value; scaled to fit
    ``largest``."""
    bound = torch.finfo(kind).max
    inverse = largest.clamp(min=1e-12) / bound
    return (x.float() / inverse).clamp(-bound, bound).to(kind), inverse, x.abs().amax().float()


def cast_and_turn(x: Tensor, largest: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`cast`, and its first result transposed."""
    bound = torch.finfo(kind).max
    inverse = largest.clamp(min=1e-12) / bound
    found = (x.float() / inverse).clamp(-bound, bound).to(kind)
    return found, inverse, x.abs().amax().float(), found.t().contiguous()


def fuse() -> None:
    """Lets the compiler make one kernel of each of the three functions above, for every shape that a model has."""
    float4.fuse()
    for function in (greatest, cast, cast_and_turn):
        globals()[function.__name__] = torch.compile(function, recompile_limit=64)


class Scaled:
    """What a layer remembers between micro-batches.

    Args:
        delayed: whether scales are those of the micro-batch before, or of the tensor at hand, which is read once more.
    """

    def __init__(self, delayed: bool) -> None:
        self.delayed = delayed
        self._largest: dict[str, Tensor] = {}
        self._weight: tuple[Tensor, Tensor, Tensor] | None = None

    def forget_weight(self) -> None:
        """The weight has changed."""
        self._weight = None

    def _bound(self, role: str, x: Tensor) -> Tensor:
        known = self._largest.get(role) if self.delayed else None
        return greatest(x) if known is None else known

    def cast(self, role: str, x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
        found, inverse, self._largest[role] = cast(x, self._bound(role, x), kind)
        return found, inverse

    def cast_and_turn(self, role: str, x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        found, inverse, self._largest[role], turned = cast_and_turn(x, self._bound(role, x), kind)
        return found, inverse, turned

    def weight(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """In float8, its factor, and transposed; once in a step."""
        if self._weight is None:
            self._weight = self.cast_and_turn("weight", weight.detach(), FORWARD)
        return self._weight


class Packed(Scaled):
    """The same of a layer that multiplies in blocks of 4 bits, all of which want the tensor's greatest value first."""

    def __init__(self) -> None:
        super().__init__(delayed=False)

    def cast(self, role: str, x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
        return float4.pack(x, greatest(x))

    def cast_and_turn(self, role: str, x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        return float4.pack_and_turn(x, greatest(x))


def gather_to_turn(x: Tensor, split: Any) -> Pending:
    """What `turned` takes: all ranks' parts of a cast tensor, or of 4 bits, of a transposed one."""
    return gather(x, split.group, 1 if x.dtype == torch.uint8 else split.pieces)


def turned(x: Tensor, split: Any) -> Tensor:
    """What a product takes, transposed; ``x`` is transposed already where it has 4 bits, but for ranks' parts."""
    if x.dtype != torch.uint8:
        return x.t().contiguous()
    return float4.join(x.unflatten(0, (split.ranks, -1)), split.pieces) if split.sequence else x


def product(a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor, out: torch.dtype) -> Tensor:
    """``a @ b.T`` of (rows, inner) and (columns, inner), with their factors."""
    if a.dtype != torch.uint8:
        return torch._scaled_mm(a, b.t(), scale_a=of_a, scale_b=of_b, out_dtype=out)
    found = torch.empty(len(a), len(b), dtype=out, device=a.device)
    float4.multiply(a, b, of_a, of_b, found)
    return found


def into(of_a: Tensor, b: Tensor, of_b: Tensor) -> Multiply:
    """Writes the `product` of what comes with ``b``."""

    def multiply(a: Tensor, out: Tensor) -> None:
        if a.dtype == torch.uint8:
            float4.multiply(a, b, of_a, of_b, out)
        else:
            torch._scaled_mm(a, b.t(), scale_a=of_a, scale_b=of_b, out_dtype=out.dtype, out=out)

    return multiply


def accumulate(weight: nn.Parameter, gradient: Tensor, x: Tensor, factors: tuple[Tensor, Tensor]) -> Tensor | None:
    """Adds ``gradient @ x.T`` of (outputs, rows) and (inputs, rows) to ``main_grad`` where there is one."""
    main = getattr(weight, "main_grad", None)
    if main is None:
        return product(gradient, factors[0], x, factors[1], weight.dtype)
    add_product(main, gradient, x, factors, weight.dtype)
    return added(weight)


def add_product(main: Tensor, gradient: Tensor, x: Tensor, factors: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    """Adds ``gradient @ x.T``, which comes in ``dtype``; on GPUs the product itself adds."""
    if main.is_cuda:
        if x.dtype == torch.uint8:
            gradient, x = (float4.parts(each)[0].view(torch.float4_e2m1fn_x2) for each in (gradient, x))
        main.addmm_(gradient, x.t())
    else:
        main.add_(product(gradient, factors[0], x, factors[1], dtype))


class Column(torch.autograd.Function):
    """Of a matrix split by its outputs: (sequence or a part of it, batch, inputs) to (sequence, batch, outputs)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, split: Any, scaled: Scaled) -> Tensor:
        if isinstance(scaled, Packed):
            here, of_x, kept = scaled.cast_and_turn("input", x.flatten(0, 1), FORWARD)
        else:
            here, of_x = scaled.cast("input", x.flatten(0, 1), FORWARD)
            kept = here
        matrix, of_matrix, _ = scaled.weight(weight)
        ctx.save_for_backward(kept, of_x)
        ctx.weight, ctx.split, ctx.scaled = weight, split, scaled
        if not split.sequence:
            return product(here, of_x, matrix, of_matrix, x.dtype).unflatten(0, x.shape[:2])
        out = x.new_empty(here.shape[0] * split.ranks, weight.shape[0])
        gather_and_multiply(here, split.group, split.pieces, into(of_x, matrix, of_matrix), out)
        return out.unflatten(0, (-1, x.shape[1]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (kept, of_x), split, weight = ctx.saved_tensors, ctx.split, ctx.weight
        again = gather_to_turn(kept, split) if split.sequence else None
        found, of_found, of_rows = ctx.scaled.cast_and_turn("gradient", gradient.flatten(0, 1), BACKWARD)
        _, of_matrix, matrix = ctx.scaled.weight(weight)
        of_input = product(found, of_found, matrix, of_matrix, gradient.dtype).unflatten(0, gradient.shape[:2])
        whole = done(again) if again else kept
        reduced = split.reduce(of_input)
        if not split.overlap:
            wait(reduced)
        of_weight = accumulate(weight, of_rows, turned(whole, split), (of_found, of_x))
        return done(reduced), of_weight, None, None


class Row(torch.autograd.Function):
    """Of a matrix split by its inputs: (sequence, batch, inputs here) to (sequence or a part of it, batch, outputs)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, split: Any, scaled: Scaled) -> Tensor:
        here, of_x, of_rows = scaled.cast_and_turn("input", x.flatten(0, 1), FORWARD)
        matrix, of_matrix, _ = scaled.weight(weight)
        ctx.save_for_backward(of_rows, of_x)
        ctx.weight, ctx.split, ctx.scaled, ctx.batch = weight, split, scaled, x.shape[1]
        if not split.sequence:
            part = product(here, of_x, matrix, of_matrix, x.dtype)
            return done(total(part, split.group)).unflatten(0, x.shape[:2])
        out = x.new_empty(here.shape[0], weight.shape[0])
        multiply = into(of_x, matrix, of_matrix)
        return multiply_and_scatter(here, split.group, split.pieces, multiply, out).unflatten(0, (-1, x.shape[1]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, of_x), split, weight = ctx.saved_tensors, ctx.split, ctx.weight
        flat = gradient.flatten(0, 1)
        _, of_matrix, matrix = ctx.scaled.weight(weight)
        if split.sequence:
            kept = None
            if isinstance(ctx.scaled, Packed):
                here, of_found, kept = ctx.scaled.cast_and_turn("gradient", flat, BACKWARD)
            else:
                here, of_found = ctx.scaled.cast("gradient", flat, BACKWARD)
            of_input = gradient.new_empty(len(here) * split.ranks, len(matrix))
            multiply = into(of_found, matrix, of_matrix)
            whole = gather_and_multiply(here, split.group, split.pieces, multiply, of_input)
            of_rows = turned(whole if kept is None else done(gather_to_turn(kept, split)), split)
        else:
            found, of_found, of_rows = ctx.scaled.cast_and_turn("gradient", flat, BACKWARD)
            of_input = product(found, of_found, matrix, of_matrix, gradient.dtype)
        of_weight = accumulate(weight, of_rows, x, (of_found, of_x))
        return of_input.unflatten(0, (-1, ctx.batch)), of_weight, None, None


class Whole(torch.autograd.Function):
    """Of a matrix that is not split, cast at every forward pass: (rows, inputs) to (rows, outputs)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scaled: Scaled) -> Tensor:
        here, of_x, x_turned = scaled.cast_and_turn("input", x, FORWARD)
        matrix, of_matrix, matrix_turned = scaled.cast_and_turn("weight", weight, FORWARD)
        ctx.save_for_backward(x_turned, of_x, matrix_turned, of_matrix)
        ctx.scaled, ctx.dtype, ctx.bias = scaled, weight.dtype, bias is not None
        return torch._scaled_mm(here, matrix.t(), scale_a=of_x, scale_b=of_matrix, bias=bias, out_dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x_turned, of_x, matrix_turned, of_matrix = ctx.saved_tensors
        found, of_found, turned = ctx.scaled.cast_and_turn("gradient", gradient, BACKWARD)
        of_input = product(found, of_found, matrix_turned, of_matrix, gradient.dtype)
        of_weight = product(turned, of_found, x_turned, of_x, ctx.dtype)
        return of_input, of_weight, gradient.sum(0) if ctx.bias else None, None


class Linear(nn.Linear):
    """A linear layer that multiplies in float8."""

    scaled: Scaled

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.Linear's name)
        rows = Whole.apply(input.flatten(0, -2), self.weight, self.bias, self.scaled)
        return rows.unflatten(0, input.shape[:-1])


def convert(module: nn.Module) -> None:
    """Makes every linear layer below ``module`` a `Linear` with scales of the micro-batch before, in place."""
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = Linear
            layer.scaled = Scaled(delayed=True)
