"""Modules of one GPU each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from foretrain.live.device.custom_kernels import Like, fused

from .fp8 import linear

Tensor = torch.Tensor


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
