"""Products in FP8: operands are cast by a kernel of their own, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as _checkpoint

from foretrain.live.device.custom_kernels import launch

from ..common.recipe import DelayedScaling, Recipe

_recipes: list[Recipe | None] = [None]
"""The recipes of the contexts that are open; None computes as PyTorch does."""


@contextmanager
def autocast(enabled: bool = True, recipe: Recipe | None = None, **_: Any) -> Iterator[None]:
    """Compute in FP8 inside."""
    _recipes.append((recipe or DelayedScaling()) if enabled else None)
    try:
        yield
    finally:
        _recipes.pop()


def fp8_autocast(enabled: bool = True, fp8_recipe: Recipe | None = None, **_: Any) -> Any:
    """Compute in FP8 inside; the older name."""
    return autocast(enabled, fp8_recipe)


@contextmanager
def fp8_model_init(enabled: bool = True, **_: Any) -> Iterator[None]:
    """Refuse parameters in FP8: no optimizer here keeps copies of them."""
    if enabled:
        raise NotImplementedError(
            "fp8_model_init: foretrain's stand-in for transformer_engine has parameters in the module's own type; leave"
            " it out, or install transformer_engine"
        )
    yield


quantized_model_init = fp8_model_init


def checkpoint(function: Any, *args: Any, **named: Any) -> Any:
    """Compute ``function`` again in the backward pass instead of keeping what it makes."""
    options = ("distribute_saved_activations", "get_rng_state_tracker", "tp_group")
    named = {key: value for key, value in named.items() if key not in options}
    return _checkpoint(function, *args, use_reentrant=named.pop("use_reentrant", True), **named)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x (..., k)`` by ``weight (n, k)``, in FP8 where a recipe says so."""
    recipe = _recipes[-1]
    if recipe is None:
        return torch.nn.functional.linear(x, weight, bias)
    if torch.is_autocast_enabled("cuda"):
        x, weight = (one.to(torch.get_autocast_dtype("cuda")) for one in (x, weight))
        bias = None if bias is None else bias.to(x.dtype)
    product: Any = _Fp8Product.apply(x.flatten(0, -2), weight, recipe.blocks)
    product = product.unflatten(0, x.shape[:-1])
    return product if bias is None else product + bias


class _Fp8Product(torch.autograd.Function):
    """``x (m, k)`` by ``weight (n, k)``; kept for the backward pass are the operands in FP8, each both ways round."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, blocks: bool) -> torch.Tensor:
        x8, x8_turned = _cast(x)
        weight8, weight8_turned = _cast(weight)
        ctx.save_for_backward(x8_turned, weight8_turned)
        ctx.dtype, ctx.blocks = x.dtype, blocks
        return _product(x8, weight8.t(), x.dtype, blocks)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x8_turned, weight8_turned = ctx.saved_tensors
        grad8, grad8_turned = _cast(gradients[0])
        of_x = _product(grad8, weight8_turned.t(), ctx.dtype, ctx.blocks) if ctx.needs_input_grad[0] else None
        of_weight = _product(grad8_turned, x8_turned.t(), ctx.dtype, ctx.blocks) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, None


def _cast(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in FP8 and its transpose, row by row: tensor cores want both factors along the sum."""
    rows, columns = tensor.shape
    made = [tensor.new_empty(shape, dtype=torch.float8_e4m3fn) for shape in ((rows, columns), (columns, rows))]
    launch("transformer_engine::cast_transpose", {"tensor": tensor}, ("tensor",), (), made)
    return made[0], made[1]


def _product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype, blocks: bool) -> torch.Tensor:
    scale = torch.ones((), device=left.device)
    if not blocks:
        return torch.ops.aten._scaled_mm(left, right, scale, scale, None, None, dtype)
    (m, k), n = left.shape, right.shape[1]
    scales = (left.new_empty(size, -(-k // 128), dtype=torch.float32) for size in (m, n))
    first, second = scales
    return torch.ops.aten._scaled_mm(left, right, first, second.t(), None, None, dtype)
