"""FlashAttention 2 on PyTorch's own kernel of it, so that it takes the time that attention is measured to take.

A window is charged as if all keys before a query were seen: the measured kernels have none.
"""

from __future__ import annotations

from typing import Any

import torch

__version__ = "2.8.3"

Tensor = torch.Tensor


def flash_attn_func(
    q: Tensor,  # (batch, length, heads, width), as are keys and values, perhaps of fewer heads
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attend; return ``(batch, length, heads, width)``."""
    return _attend(q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, causal, softmax_scale, return_attn_probs)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **named: Any) -> Any:
    """Attend to ``(batch, length, 3, heads, width)``."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *args, **named)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **named: Any) -> Any:
    """Attend to keys and values ``(batch, length, 2, heads, width)``."""
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *args, **named)


def flash_attn_varlen_func(
    q: Tensor,  # (positions, heads, width): sequences one behind the other
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attend within sequences that begin at ``cu_seqlens``; return ``(positions, heads, width)``."""
    bounds = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return _attend(q, k, v, *bounds, dropout_p, causal, softmax_scale, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **named: Any) -> Any:
    """Attend to ``(positions, 3, heads, width)``."""
    q, k, v = qkv.unbind(1)
    bounds = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(q, k, v, *bounds, *args, **named)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **named: Any) -> Any:
    """Attend to keys and values ``(positions, 2, heads, width)``."""
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, *args, **named)


def flash_attn_with_kvcache(
    q: Tensor,  # (batch, length, heads, width), for the positions that are new
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    **_: Any,
) -> Any:
    """Attend to all of the cache, however much of it is filled."""
    return flash_attn_func(q, k_cache, v_cache, 0.0, softmax_scale, causal)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds_q: Tensor | None,
    bounds_k: Tensor | None,
    longest_q: int,
    longest_k: int,
    dropout: float,
    causal: bool,
    scale: float | None,
    statistics: bool,
) -> Any:
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    attended, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, bounds_q, bounds_k, longest_q, longest_k, dropout, causal, False, scale=scale
    )
    return (attended, logsumexp, None) if statistics else attended
