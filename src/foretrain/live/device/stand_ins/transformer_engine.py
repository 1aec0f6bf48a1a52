"""Transformer Engine: modules of PyTorch whose products are in FP8 where a recipe says so.

Norms and activations are kernels of their own, before the products whose operands they cast. Operands are cast to FP8
by a kernel of their own, forward and backward. Parallel over tensors or sequences there is nothing: ``tp_group`` and
its like are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as _checkpoint

from foretrain.live.device.custom_kernels import Like, fused, launch
from foretrain.live.device.stand_ins import submodule
from foretrain.live.device.stand_ins.apex import FusedAdam, FusedSGD

__version__ = "2.9.0"

Tensor = torch.Tensor


class Format(Enum):
    """Formats of FP8 forward and backward."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


class Recipe:
    """How to scale; the options matter for values alone."""

    blocks = False

    def __init__(self, **options: Any) -> None:
        self.options = options


class DelayedScaling(Recipe):
    """A scale for each tensor, of the steps before."""


class Float8CurrentScaling(Recipe):
    """A scale for each tensor, of this step."""


class Float8BlockScaling(Recipe):
    """A scale for each 128 numbers."""

    blocks = True


class MXFP8BlockScaling(Recipe):
    """A scale for each 32 numbers."""

    blocks = True


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


def checkpoint(function: Any, *args: Any, **named: Any) -> Any:
    """Compute ``function`` again in the backward pass instead of keeping what it makes."""
    options = ("distribute_saved_activations", "get_rng_state_tracker", "tp_group")
    named = {key: value for key, value in named.items() if key not in options}
    return _checkpoint(function, *args, use_reentrant=named.pop("use_reentrant", True), **named)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
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
    def forward(ctx: Any, x: Tensor, weight: Tensor, blocks: bool) -> Tensor:
        x8, x8_turned = _cast(x)
        weight8, weight8_turned = _cast(weight)
        ctx.save_for_backward(x8_turned, weight8_turned)
        ctx.dtype, ctx.blocks = x.dtype, blocks
        return _product(x8, weight8.t(), x.dtype, blocks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x8_turned, weight8_turned = ctx.saved_tensors
        grad8, grad8_turned = _cast(gradients[0])
        of_x = _product(grad8, weight8_turned.t(), ctx.dtype, ctx.blocks) if ctx.needs_input_grad[0] else None
        of_weight = _product(grad8_turned, x8_turned.t(), ctx.dtype, ctx.blocks) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, None


def _cast(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix in FP8 and its transpose, row by row: tensor cores want both factors along the sum."""
    rows, columns = tensor.shape
    made = [tensor.new_empty(shape, dtype=torch.float8_e4m3fn) for shape in ((rows, columns), (columns, rows))]
    launch("transformer_engine::cast_transpose", {"tensor": tensor}, ("tensor",), (), made)
    return made[0], made[1]


def _product(left: Tensor, right: Tensor, dtype: torch.dtype, blocks: bool) -> Tensor:
    scale = torch.ones((), device=left.device)
    if not blocks:
        return torch.ops.aten._scaled_mm(left, right, scale, scale, None, None, dtype)
    (m, k), n = left.shape, right.shape[1]
    scales = (left.new_empty(size, -(-k // 128), dtype=torch.float32) for size in (m, n))
    first, second = scales
    return torch.ops.aten._scaled_mm(left, right, first, second.t(), None, None, dtype)


class LayerNorm(nn.LayerNorm):
    """Layer norm, one kernel."""

    def __init__(self, hidden_size: Any, eps: float = 1e-5, params_dtype: Any = None, device: Any = "cuda", **_: Any):
        super().__init__(hidden_size, eps, device=device, dtype=params_dtype)


class RMSNorm(nn.RMSNorm):
    """RMS norm, one kernel."""

    def __init__(self, hidden_size: Any, eps: float = 1e-5, params_dtype: Any = None, device: Any = "cuda", **_: Any):
        super().__init__(hidden_size, eps, device=device, dtype=params_dtype)


def _norm(kind: str, size: int, eps: float, **where: Any) -> nn.Module:
    return (RMSNorm if kind == "RMSNorm" else LayerNorm)(size, eps, **where)


def _refuse_parallel(options: dict[str, Any]) -> None:
    """Raise NotImplementedError for options that divide a module among GPUs."""
    sizes = {name: options.get(name) for name in ("tp_size", "tp_group", "parallel_mode", "sequence_parallel")}
    for name, value in sizes.items():
        if value not in (None, False, 1):
            raise NotImplementedError(
                f"{name}={value!r}: foretrain's stand-in for transformer_engine has modules of one GPU; leave it out,"
                " or install transformer_engine"
            )


class Linear(nn.Linear):
    """A product, in FP8 inside ``fp8_autocast``."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        params_dtype: Any = None,
        device: Any = "cuda",
        **options: Any,
    ) -> None:
        _refuse_parallel(options)
        super().__init__(in_features, out_features, bias, device, params_dtype)

    def forward(self, input: Tensor, **_: Any) -> Tensor:
        """Return the product."""
        return linear(input, self.weight, self.bias)


class LayerNormLinear(Linear):
    """A norm and a product."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        params_dtype: Any = None,
        device: Any = "cuda",
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, params_dtype=params_dtype, device=device, **options)
        self.norm = _norm(normalization, in_features, eps, params_dtype=params_dtype, device=device)

    def forward(self, input: Tensor, **named: Any) -> Tensor:
        """Return the product of the norm."""
        return super().forward(self.norm(input), **named)


_GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": functional.silu,
    "geglu": functional.gelu,
    "reglu": functional.relu,
}
_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "relu": functional.relu,
    "silu": functional.silu,
}


class LayerNormMLP(nn.Module):
    """A norm, a product, an activation, and a product."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        params_dtype: Any = None,
        device: Any = "cuda",
        **options: Any,
    ) -> None:
        super().__init__()
        self.activation = activation
        wide = ffn_hidden_size * (2 if activation in _GATED else 1)
        where = {"params_dtype": params_dtype, "device": device}
        self.fc1 = LayerNormLinear(hidden_size, wide, eps, normalization, bias=bias, **where, **options)
        self.fc2 = Linear(ffn_hidden_size, hidden_size, bias, **where, **options)

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """Return ``(..., hidden_size)``."""
        inner = self.fc1(hidden_states)
        if self.activation not in _GATED:
            return self.fc2(_PLAIN[self.activation](inner))
        shape = (*inner.shape[:-1], inner.shape[-1] // 2)
        return self.fc2(fused(f"transformer_engine::{self.activation}", (inner,), Like(inner, shape)))


class DotProductAttention(nn.Module):
    """Fused attention, by cuDNN's kernel."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: Any,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        **options: Any,
    ) -> None:
        super().__init__()
        _refuse_parallel(options)
        self.dropout, self.qkv_format, self.attn_mask_type = attention_dropout, qkv_format, attn_mask_type

    def forward(
        self,
        query_layer: Tensor,  # (length, batch, heads, width), or batch first
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        attn_mask_type: str | None = None,
        **_: Any,
    ) -> Tensor:
        """Return ``(length, batch, heads · width)``, or batch first."""
        layout = qkv_format or self.qkv_format
        if layout not in ("sbhd", "bshd"):
            raise NotImplementedError(
                f"qkv_format={layout!r}: foretrain's stand-in for transformer_engine has 'sbhd' and 'bshd'; install "
                "transformer_engine for others"
            )
        order = (1, 2, 0, 3) if layout == "sbhd" else (0, 2, 1, 3)
        q, k, v = (one.permute(order) for one in (query_layer, key_layer, value_layer))
        causal = "causal" in (attn_mask_type or self.attn_mask_type)
        dropout = self.dropout if self.training else 0.0
        grouped = q.shape[1] != k.shape[1]
        attended = functional.scaled_dot_product_attention(q, k, v, None, dropout, causal, enable_gqa=grouped)
        return attended.permute((2, 0, 1, 3) if layout == "sbhd" else (0, 2, 1, 3)).flatten(2)


class MultiheadAttention(nn.Module):
    """Projections around attention, with a norm before them if ``input_layernorm``."""

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        num_gqa_groups: int | None = None,
        attn_mask_type: str = "causal",
        input_layernorm: bool = False,
        normalization: str = "LayerNorm",
        bias: bool = True,
        params_dtype: Any = None,
        device: Any = "cuda",
        qkv_format: str = "sbhd",
        **options: Any,
    ) -> None:
        super().__init__()
        self.heads, self.groups = num_attention_heads, num_gqa_groups or num_attention_heads
        self.width = kv_channels or hidden_size // num_attention_heads
        wide = self.width * (self.heads + 2 * self.groups)
        where = {"bias": bias, "params_dtype": params_dtype, "device": device}
        self.qkv = (
            LayerNormLinear(hidden_size, wide, layernorm_epsilon, normalization, **where, **options)
            if input_layernorm
            else Linear(hidden_size, wide, **where, **options)
        )
        self.attention = DotProductAttention(
            self.heads, self.width, self.groups, attention_dropout, qkv_format, attn_mask_type
        )
        self.proj = Linear(self.width * self.heads, hidden_size, **where)

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, rotary_pos_emb: Tensor | None = None, **_: Any
    ) -> Tensor:
        """Return as many numbers as were given."""
        every = self.qkv(hidden_states).unflatten(-1, (self.heads + 2 * self.groups, self.width))
        q, k, v = every.split([self.heads, self.groups, self.groups], -2)
        if rotary_pos_emb is not None:
            q, k = (fused("transformer_engine::rotary", (one, rotary_pos_emb), Like(one)) for one in (q, k))
        return self.proj(self.attention(q, k, v, attention_mask))


class TransformerLayer(nn.Module):
    """Attention and a multi-layer perceptron, each with its norm before and what it was given added."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        self_attn_mask_type: str = "causal",
        normalization: str = "LayerNorm",
        bias: bool = True,
        activation: str = "gelu",
        params_dtype: Any = None,
        device: Any = "cuda",
        attn_input_format: str = "sbhd",
        **options: Any,
    ) -> None:
        super().__init__()
        _refuse_parallel(options)
        self.hidden_dropout = hidden_dropout
        where = {"params_dtype": params_dtype, "device": device}
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            attention_dropout=attention_dropout,
            layernorm_epsilon=layernorm_epsilon,
            num_gqa_groups=num_gqa_groups,
            attn_mask_type=self_attn_mask_type,
            input_layernorm=True,
            normalization=normalization,
            bias=bias,
            qkv_format=attn_input_format,
            **where,
        )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, layernorm_epsilon, bias, normalization, activation, **where
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, rotary_pos_emb: Tensor | None = None, **_: Any
    ) -> Tensor:
        """Return ``(length, batch, hidden_size)``, or batch first."""
        attended = self.self_attention(hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb)
        hidden_states = hidden_states + functional.dropout(attended, self.hidden_dropout, self.training)
        return hidden_states + functional.dropout(self.layernorm_mlp(hidden_states), self.hidden_dropout, self.training)


_FP8 = (autocast, checkpoint, fp8_autocast, fp8_model_init)
submodule(
    f"{__name__}.common.recipe",
    Format,
    Recipe,
    DelayedScaling,
    Float8CurrentScaling,
    Float8BlockScaling,
    MXFP8BlockScaling,
)
submodule(
    f"{__name__}.pytorch",
    *_FP8,
    DotProductAttention,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    RMSNorm,
    TransformerLayer,
    quantized_model_init=fp8_model_init,
)
submodule(f"{__name__}.pytorch.fp8", *_FP8, quantized_model_init=fp8_model_init)
submodule(f"{__name__}.pytorch.optimizers", FusedAdam, FusedSGD)
