"""FlashAttention 3, which the package `kernels` downloads, as two operators that take the time of the best attention.

Scripts import it as `flash_attn_interface`, or `foretrain.live.device.hub_kernels` hands it out.
"""

from __future__ import annotations

from typing import Any

import torch

from foretrain.live.device.stand_ins import submodule

Tensor = torch.Tensor

_GIVEN = "Tensor q, Tensor k, Tensor v, int batch, int queries, int keys, bool causal, int window"
_library = torch.library.Library("flash_attn_3", "DEF")
_library.define(f"forward({_GIVEN}) -> (Tensor, Tensor)")
_library.define(f"backward(Tensor dout, Tensor out, Tensor sums, {_GIVEN}) -> (Tensor, Tensor, Tensor)")


def flash_attn_func(
    q: Tensor,  # (batch, length, heads, width), as are keys and values, perhaps of fewer heads
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attend; return ``(batch, length, heads, width)``."""
    lengths = q.shape[0], q.shape[1], k.shape[1]
    return _attend(q, k, v, lengths, causal, window_size, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,  # (positions, heads, width): sequences one behind the other
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attend within sequences that begin at ``cu_seqlens``, taken to be of equal length."""
    batch = max(1, cu_seqlens_q.shape[0] - 1)
    lengths = batch, -(-q.shape[0] // batch), -(-k.shape[0] // batch)
    return _attend(q, k, v, lengths, causal, window_size, return_attn_probs)


def flash_attn_with_kvcache(
    q: Tensor,  # (batch, length, heads, width), for the positions that are new
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    **_: Any,
) -> Any:
    """Attend to all of the cache, however much of it is filled."""
    return flash_attn_func(q, k_cache, v_cache, softmax_scale, causal, window_size=window_size)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, int, int],
    causal: bool,
    window: tuple[int, int],
    statistics: bool,
) -> Any:
    before, after = window[0], 0 if causal else window[1]
    seen = 0 if min(before, after) < 0 else before + 1 + after
    out, sums = torch.ops.flash_attn_3.forward(q, k, v, *lengths, causal, seen)
    return (out, sums) if statistics else out


@torch.library.register_fake("flash_attn_3::forward", lib=_library)
def _forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    *before, heads = q.shape[:-1]
    sums = (*before[:-1], heads, *before[-1:])  # of each query's softmax: the heads stand before the length
    return q.new_empty((*before, heads, v.shape[-1]), dtype=dtype), q.new_empty(sums, dtype=torch.float32)


@torch.library.register_fake("flash_attn_3::backward", lib=_library)
def _backward(dout: Tensor, out: Tensor, sums: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Any:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:3])
    ctx.numbers = inputs[3:]


def _gradients(ctx: Any, dout: Tensor, _: Tensor) -> Any:
    made = torch.ops.flash_attn_3.backward(dout, *ctx.saved_tensors, *ctx.numbers)
    return (*made, *(None for _ in ctx.numbers))


torch.library.register_autograd("flash_attn_3::forward", _gradients, setup_context=_keep, lib=_library)

_ATTENTION = flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
submodule(f"{__name__}.flash_attn_interface", *_ATTENTION)
