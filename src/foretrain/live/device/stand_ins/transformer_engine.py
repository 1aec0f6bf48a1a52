"""Transformer Engine: modules of PyTorch whose products are in FP8 where a recipe says so.

Norms and activations are kernels of their own, before the products whose operands they cast. Operands are cast to FP8
by a kernel of their own, forward and backward. Layers are divided among the ranks of ``tp_group``, along the sequence
too, as Megatron-LM does; communication through user buffers (``ub_overlap_ag`` and its like) is refused.
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

from foretrain.live.device.custom_kernels import Like, fused
from foretrain.live.device.stand_ins import submodule
from foretrain.live.device.stand_ins.apex import FusedAdam, FusedSGD
from foretrain.live.device.stand_ins.te_kernels import (
    Division,
    dummy_gradient,
    grouped_product,
    product,
    ring_attention,
)

__version__ = "2.9.0"

Tensor = torch.Tensor
_torch: Any = torch
"""PyTorch with functions that it does not export."""


class Format(Enum):
    """Formats of FP8 forward and backward."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


class Recipe:
    """Options of scaling; they matter for values alone, but for these.

    Attributes:
        block: how many numbers have a scale; 0 if a tensor has one.
        current: whether the scale is that of the tensor at hand, whose maximum is to be found first.
    """

    block = 0
    current = False

    def __init__(self, **options: Any) -> None:
        self.options = options


class DelayedScaling(Recipe):
    """A scale for each tensor, of the steps before."""


class Float8CurrentScaling(Recipe):
    """A scale for each tensor, of this step."""

    current = True


class Float8BlockScaling(Recipe):
    """A scale for each 128 numbers."""

    block = 128


class MXFP8BlockScaling(Recipe):
    """A scale for each 32 numbers, which only Blackwell's tensor cores take."""

    block = 32


_recipes: list[Recipe | None] = [None]
"""The recipes of the contexts that are open; None computes as PyTorch does."""


@contextmanager
def autocast(enabled: bool = True, recipe: Recipe | None = None, **_: Any) -> Iterator[None]:
    """Compute in FP8 inside."""
    if enabled and isinstance(recipe, MXFP8BlockScaling) and torch.cuda.get_device_capability() < (10, 0):
        raise RuntimeError("Device compute capability 10.0 or higher required for MXFP8 execution.")
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


class LayerNorm(nn.LayerNorm):
    """Layer norm, one kernel."""

    def __init__(
        self,
        hidden_size: Any = None,
        eps: float = 1e-5,
        params_dtype: Any = None,
        device: Any = "cuda",
        sequence_parallel: bool | None = None,
        normalized_shape: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(hidden_size or normalized_shape, eps, device=device, dtype=params_dtype)
        _mark_sequence(self, sequence_parallel)


class RMSNorm(nn.RMSNorm):
    """RMS norm, one kernel."""

    def __init__(
        self,
        hidden_size: Any = None,
        eps: float = 1e-5,
        params_dtype: Any = None,
        device: Any = "cuda",
        sequence_parallel: bool | None = None,
        normalized_shape: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(hidden_size or normalized_shape, eps, device=device, dtype=params_dtype)
        _mark_sequence(self, sequence_parallel)


def _mark_sequence(module: nn.Module, sequence_parallel: bool | None) -> None:
    """Say whether gradients are of the own part of the sequence, as Megatron-LM asks every parameter."""
    if sequence_parallel is not None:
        for parameter in module.parameters():
            parameter.sequence_parallel = sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]


class TransformerEngineBaseModule(nn.Module):
    """A module with products: how it is divided among GPUs, and what Megatron-LM asks of it."""

    def __init__(self, in_features: int, out_features: int, options: dict[str, Any]) -> None:
        super().__init__()
        for name in ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "delay_wgrad_compute"):
            if options.get(name):
                raise NotImplementedError(
                    f"{name}=True: foretrain's stand-in for transformer_engine has neither communication through user"
                    " buffers nor delayed gradients; leave it out, or install transformer_engine"
                )
        self.parallel_mode, self.tp_group = options.get("parallel_mode"), options.get("tp_group")
        self.tp_size = options.get("tp_size") or 1
        self.sequence_parallel = bool(options.get("sequence_parallel")) and self.tp_size > 1
        self.fuse_wgrad_accumulation = bool(options.get("fuse_wgrad_accumulation"))
        self.return_bias = bool(options.get("return_bias"))
        self.save_original_input = False
        columns, rows = (self.tp_size if self.parallel_mode == mode else 1 for mode in ("column", "row"))
        self.in_features, self.out_features = in_features // rows, out_features // columns

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the ranks among which the module is divided."""
        self.tp_group = tp_group

    def make(self, name: str, shape: tuple[int, ...], mode: str | None, dtype: Any, device: Any, init: Any) -> None:
        """Add a parameter, divided along its first dimension by columns, its second by rows."""
        made = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        with torch.no_grad():
            if init is not None and len(shape) > 1:
                init(made)
            elif len(shape) > 1:
                nn.init.normal_(made, 0.0, 0.02)
            else:
                made.zero_()
        divided = self.tp_size > 1 and (mode == "column" or (mode == "row" and len(shape) > 1))
        marks = {
            "tensor_model_parallel": divided,
            "partition_dim": int(mode == "row"),
            "partition_stride": 1,
            **({"sequence_parallel": True} if mode == "row" and len(shape) == 1 and self.sequence_parallel else {}),
        }
        vars(made).update(marks)
        self.register_parameter(name, made)

    @property
    def division(self) -> Division:
        """Return how its products are divided."""
        mode = self.parallel_mode if self.tp_size > 1 else None
        return Division(mode, self.tp_group, self.sequence_parallel, self.fuse_wgrad_accumulation)

    def get_extra_state(self) -> Tensor:
        """Return scales of FP8, of which there are none."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Scales of FP8 do not matter."""


def _ranks(group: Any) -> int:
    return 1 if group is None else torch.distributed.get_world_size(group)


def _divided(options: dict[str, Any], mode: str) -> dict[str, Any]:
    """Return the options of a product inside a module that is divided among GPUs if ``set_parallel_mode`` says so."""
    kept = {key: value for key, value in options.items() if key != "set_parallel_mode"}
    if not options.get("set_parallel_mode"):
        return kept | {"tp_size": 1, "sequence_parallel": False}
    return kept | {"parallel_mode": mode, "tp_size": options.get("tp_size") or _ranks(options.get("tp_group"))}


class Linear(TransformerEngineBaseModule):
    """A product, in FP8 inside ``fp8_autocast``."""

    weight: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        params_dtype: Any = None,
        device: Any = "cuda",
        init_method: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, options)
        where = (self.parallel_mode, params_dtype, device, init_method)
        self.make("weight", (self.out_features, self.in_features), *where)
        if bias:
            self.make("bias", (self.out_features,), *where)
        else:
            self.bias = None

    def forward(self, input: Tensor, **_: Any) -> Any:
        """Return the product; with ``return_bias`` without the bias, and the bias."""
        bias = self.bias
        made = product(input, self.weight, None if self.return_bias else bias, _recipes[-1], self.division)
        return (made, bias) if self.return_bias else made


class LayerNormLinear(Linear):
    """A norm and a product."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        params_dtype: Any = None,
        device: Any = "cuda",
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, params_dtype, device, **options)
        self.eps, self.normalization = eps, normalization
        shape = (in_features,)
        self.layer_norm_weight = nn.Parameter(torch.ones(shape, dtype=params_dtype, device=device))
        self.layer_norm_bias = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = nn.Parameter(torch.zeros(shape, dtype=params_dtype, device=device))
        for one in (self.layer_norm_weight, self.layer_norm_bias):
            if one is not None:
                one.sequence_parallel = self.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, input: Tensor, **named: Any) -> Any:
        """Return the product of the norm."""
        shape = (input.shape[-1],)
        if self.normalization == "RMSNorm":
            normed = functional.rms_norm(input, shape, self.layer_norm_weight, self.eps)
        else:
            normed = functional.layer_norm(input, shape, self.layer_norm_weight, self.layer_norm_bias, self.eps)
        return super().forward(normed, **named)


class GroupedLinear(TransformerEngineBaseModule):
    """Products of consecutive rows, each part by a weight of its own: experts."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        params_dtype: Any = None,
        device: Any = "cuda",
        init_method: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, options)
        if self.tp_size > 1 and self.parallel_mode is not None:
            raise NotImplementedError(
                f"parallel_mode={self.parallel_mode!r} of GroupedLinear: foretrain's stand-in for transformer_engine"
                " has experts of one GPU each; give it divided sizes, or install transformer_engine"
            )
        self.num_gemms = num_gemms
        for number in range(num_gemms):
            where = (None, params_dtype, device, init_method)
            self.make(f"weight{number}", (self.out_features, self.in_features), *where)
            if bias:
                self.make(f"bias{number}", (self.out_features,), *where)
        self.use_bias = bias

    def forward(self, inp: Tensor, m_splits: list[int], **_: Any) -> Any:
        """Return as many rows as were given; with ``return_bias`` without biases, and the biases."""
        numbers = range(self.num_gemms)
        weights = [self.get_parameter(f"weight{number}") for number in numbers]
        biases = [self.get_parameter(f"bias{number}") for number in numbers] if self.use_bias else []
        added = [] if self.return_bias else biases
        made = grouped_product(inp, m_splits, weights, added, _recipes[-1], self.fuse_wgrad_accumulation)
        return (made, biases) if self.return_bias else made


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
        self.fc1 = LayerNormLinear(hidden_size, wide, eps, bias, normalization, **where, **_divided(options, "column"))
        self.fc2 = Linear(ffn_hidden_size, hidden_size, bias, **where, **_divided(options, "row"))

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
        self.dropout, self.qkv_format, self.attn_mask_type = attention_dropout, qkv_format, attn_mask_type
        self.set_context_parallel_group(options.get("cp_group"), cp_comm_type=options.get("cp_comm_type") or "p2p")

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """Set the ranks among which the sequence is divided."""
        divided = cp_group is not None and (
            isinstance(cp_group, list) or torch.distributed.get_world_size(cp_group) > 1
        )
        if divided and cp_comm_type != "p2p":
            raise NotImplementedError(
                f"cp_comm_type={cp_comm_type!r}: foretrain's stand-in for transformer_engine divides sequences by"
                " 'p2p'; install transformer_engine for others"
            )
        self.cp_group, self.cp_comm_type = cp_group if divided else None, cp_comm_type

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
        if self.cp_group is not None:
            attended = ring_attention(q, k, v, self.cp_group, causal, dropout)
            return attended.permute((2, 0, 1, 3) if layout == "sbhd" else (0, 2, 1, 3)).flatten(2)
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
        ranks = (options.get("tp_size") or _ranks(options.get("tp_group"))) if options.get("set_parallel_mode") else 1
        groups = num_gqa_groups or num_attention_heads
        self.heads, self.groups = num_attention_heads // ranks, groups // ranks
        self.width = kv_channels or hidden_size // num_attention_heads
        wide = self.width * (num_attention_heads + 2 * groups)
        where = {"bias": bias, "params_dtype": params_dtype, "device": device}
        columns, rows = _divided(options, "column"), _divided(options, "row")
        self.qkv = (
            LayerNormLinear(hidden_size, wide, layernorm_epsilon, normalization=normalization, **where, **columns)
            if input_layernorm
            else Linear(hidden_size, wide, **where, **columns)
        )
        self.attention = DotProductAttention(
            self.heads, self.width, self.groups, attention_dropout, qkv_format, attn_mask_type
        )
        self.proj = Linear(self.width * num_attention_heads, hidden_size, **where, **rows)

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
            **options,
        )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, layernorm_epsilon, bias, normalization, activation, **where, **options
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, rotary_pos_emb: Tensor | None = None, **_: Any
    ) -> Tensor:
        """Return ``(length, batch, hidden_size)``, or batch first."""
        attended = self.self_attention(hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb)
        hidden_states = hidden_states + functional.dropout(attended, self.hidden_dropout, self.training)
        return hidden_states + functional.dropout(self.layernorm_mlp(hidden_states), self.hidden_dropout, self.training)


def _rotated(t: Tensor, freqs: Tensor, tensor_format: str = "sbhd", *_: Any, **__: Any) -> Tensor:
    """Return ``t`` with rotary positions, one kernel."""
    return fused("transformer_engine::rotary", (t, freqs), Like(t))


class QuantizedTensor(torch.Tensor):
    """Class of parameters in FP8, of which there are none."""


class FP8GlobalStateManager:
    """State of the innermost context of FP8, as Transformer Engine tells it."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Return whether products are in FP8 here."""
        return _recipes[-1] is not None

    @staticmethod
    def get_fp8_recipe() -> Recipe:
        """Return the recipe of this context."""
        return _recipes[-1] or DelayedScaling()

    @staticmethod
    def is_fp8_calibration() -> bool:
        """Return whether scales are only recorded."""
        return False

    @staticmethod
    def with_fp8_parameters() -> bool:
        """Return whether parameters are in FP8."""
        return False

    @staticmethod
    def reset() -> None:
        """Forget scales."""


class CudaRNGStatesTracker:
    """Named states of the random generator, none of which matters where nothing is computed."""

    def __init__(self) -> None:
        self.states_: dict[str, Any] = {}

    def reset(self) -> None:
        """Forget all."""
        self.states_.clear()

    def get_states(self) -> dict[str, Any]:
        """Return all by name."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        """Take these."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Add a state that has this seed."""
        self.states_[name] = seed

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from the state of this name inside."""
        yield


def multi_tensor_applier(operator: Callable[..., Any], flag: Tensor, lists: list[list[Tensor]], *args: Any) -> Any:
    """Call an operator of many tensors."""
    return operator(2048 * 32, flag, lists, *args)


def multi_tensor_l2norm(size: int, flag: Tensor, lists: list[list[Tensor]], per_tensor: bool = False) -> Any:
    """Return the norm of all numbers, and the norms of each tensor."""
    norms = torch.stack(_torch._foreach_norm(lists[0], dtype=torch.float32))
    return torch.linalg.vector_norm(norms).view(1), norms


def multi_tensor_scale(size: int, flag: Tensor, lists: list[list[Tensor]], scale: float) -> None:
    """Write the first tensors, scaled, into the second."""
    source, target = lists
    if all(one is other for one, other in zip(source, target, strict=True)):
        _torch._foreach_mul_(target, scale)
    else:
        _torch._foreach_copy_(target, _torch._foreach_mul(source, scale))


def _dummy(shape: Any, dtype: torch.dtype, zero: bool = False) -> Tensor:
    return dummy_gradient(tuple(shape), dtype, torch.device("cuda", torch.cuda.current_device()))


@contextmanager
def _recomputing(activation_recompute: bool = False, recompute_phase: bool = False) -> Iterator[None]:
    yield


_NO_RECOMPUTE = {"activation_recompute_forward": _recomputing, "is_fp8_activation_recompute_enabled": lambda: False}


def _absent(*names: str) -> tuple[type, ...]:
    """Return classes of these names that refuse to be made: libraries name them where they do not use them."""

    def refuse(self: Any, *_: Any, **__: Any) -> None:
        raise NotImplementedError(
            f"{type(self).__name__}: foretrain's stand-in for transformer_engine does not have it; leave the option out"
            " that wants it, or install transformer_engine"
        )

    return tuple(type(name, (), {"__init__": refuse}) for name in names)


_FP8 = (autocast, checkpoint, fp8_autocast, fp8_model_init)
_RECIPES = (Format, Recipe, DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling)
_MODULES = (
    DotProductAttention,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    RMSNorm,
    TransformerLayer,
)
_PYTORCH = f"{__name__}.pytorch"
submodule(f"{__name__}.common.recipe", *_RECIPES)
submodule(_PYTORCH, *_FP8, *_MODULES, quantized_model_init=fp8_model_init)
submodule(f"{_PYTORCH}.fp8", *_FP8, FP8GlobalStateManager, quantized_model_init=fp8_model_init)
submodule(f"{_PYTORCH}.optimizers", FusedAdam, FusedSGD, multi_tensor_applier, multi_tensor_l2norm, multi_tensor_scale)
submodule(f"{_PYTORCH}.module", GroupedLinear, LayerNormLinear, LayerNormMLP, Linear)
submodule(f"{_PYTORCH}.module.base", TransformerEngineBaseModule, get_dummy_wgrad=_dummy)
submodule(f"{_PYTORCH}.distributed", CudaRNGStatesTracker, checkpoint, **_NO_RECOMPUTE)
submodule(f"{_PYTORCH}.tensor", QuantizedTensor)
submodule(f"{_PYTORCH}.attention", DotProductAttention, MultiheadAttention, apply_rotary_pos_emb=_rotated)
submodule(f"{_PYTORCH}.attention.rope", apply_rotary_pos_emb=_rotated)
submodule(
    f"{_PYTORCH}.ops",
    *_absent("AllReduce", "BasicLinear", "Bias", "FusibleOperation", "GEGLU", "GELU", "LayerNorm", "ReGLU", "ReLU"),
    *_absent("ReduceScatter", "RMSNorm", "Sequential", "SiLU", "SwiGLU"),
)
submodule(
    f"{_PYTORCH}.router",
    *_absent("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function"),
)
