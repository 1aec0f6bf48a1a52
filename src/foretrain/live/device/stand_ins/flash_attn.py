"""FlashAttention 2 on PyTorch's own kernel of it, so that it takes the time that attention is measured to take."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from foretrain.live.device.custom_kernels import Like, fused
from foretrain.live.device.stand_ins import submodule

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
    bounds = None, None, q.shape[1], k.shape[1]
    return _attend(q, k, v, *bounds, dropout_p, causal, softmax_scale, window_size, return_attn_probs)


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
    return _attend(q, k, v, *bounds, dropout_p, causal, softmax_scale, window_size, return_attn_probs)


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
    window: tuple[int, int],
    statistics: bool,
) -> Any:
    bounds = bounds_q, bounds_k, longest_q, longest_k
    attended, logsumexp, _ = _kernel(q, k, v, *bounds, dropout, causal, scale, window)
    return (attended, logsumexp, None) if statistics else attended


def _kernel(
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
    window: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what was attended to, the logarithms of the sums, and the generator's state."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    given = q, k, v, bounds_q, bounds_k, longest_q, longest_k, dropout, causal, False
    made = torch.ops.aten._flash_attention_forward(*given, scale=scale, **_sides(window))
    return made[0], made[1], made[2]


def _sides(window: tuple[int, int]) -> dict[str, int | None]:
    before, after = (None if side < 0 else side for side in window)
    return {"window_size_left": before, "window_size_right": after}


# The functions below are not FlashAttention's interface, but context parallelism in rings calls them; it reads their
# parameters' names and defaults.


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, None, Tensor]:
    bounds, window = (None, None, q.shape[1], k.shape[1]), (window_size_left, window_size_right)
    out, logsumexp, state = _kernel(q, k, v, *bounds, dropout_p, causal, softmax_scale, window)
    return out, logsumexp, None, state


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, None, Tensor]:
    bounds, window = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), (window_size_left, window_size_right)
    out, logsumexp, state = _kernel(q, k, v, *bounds, dropout_p, causal, softmax_scale, window)
    return out, logsumexp, None, state


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    bounds, window = (None, None, q.shape[1], k.shape[1]), (window_size_left, window_size_right)
    return _backward(dout, q, k, v, out, softmax_lse, *bounds, dropout_p, causal, softmax_scale, window, rng_state)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    bounds, window = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), (window_size_left, window_size_right)
    return _backward(dout, q, k, v, out, softmax_lse, *bounds, dropout_p, causal, softmax_scale, window, rng_state)


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    bounds_q: Tensor | None,
    bounds_k: Tensor | None,
    longest_q: int,
    longest_k: int,
    dropout: float,
    causal: bool,
    scale: float | None,
    window: tuple[int, int],
    state: Tensor | None,
) -> Tensor:
    """Launch the kernels; the gradients that they make are dropped, as the caller's have no values, either."""
    state = q.new_empty(2, dtype=torch.int64) if state is None else state
    given = dout, q, k, v, out, softmax_lse, bounds_q, bounds_k, longest_q, longest_k
    torch.ops.aten._flash_attention_backward(*given, dropout, causal, state, state, scale=scale, **_sides(window))
    return torch.empty_like(softmax_lse)


class _Extension:
    """The extension itself, `flash_attn_2_cuda`, which xFormers calls; what it does not name is left out."""

    @staticmethod
    def fwd(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, alibi_slopes: Tensor | None, *rest: Any) -> Any:
        dropout, scale, causal, before, after, *_ = rest
        bounds = None, None, q.shape[1], k.shape[1]
        made, logsumexp, state = _kernel(q, k, v, *bounds, dropout, causal, scale, (before, after))
        return made, logsumexp, None, state

    @staticmethod
    def varlen_fwd(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *rest: Any
    ) -> Any:
        _seqused, _leftpad, _blocks, _slopes, longest_q, longest_k, dropout, scale, _zero, *masks = rest
        causal, before, after, *_ = masks
        bounds = cu_seqlens_q, cu_seqlens_k, longest_q, longest_k
        made, logsumexp, state = _kernel(q, k, v, *bounds, dropout, causal, scale, (before, after))
        return made, logsumexp, None, state

    @staticmethod
    def bwd(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, *rest: Any) -> Any:
        dq, dk, dv, _slopes, dropout, scale, causal, before, after, *_, state = rest
        bounds = None, None, q.shape[1], k.shape[1]
        sums = _backward(dout, q, k, v, out, softmax_lse, *bounds, dropout, causal, scale, (before, after), state)
        return dq, dk, dv, sums

    @staticmethod
    def varlen_bwd(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, *rest: Any) -> Any:
        dq, dk, dv, bounds_q, bounds_k, _slopes, longest_q, longest_k, dropout, scale, _zero, *masks, state = rest
        causal, before, after, *_ = masks
        bounds = bounds_q, bounds_k, longest_q, longest_k
        sums = _backward(dout, q, k, v, out, softmax_lse, *bounds, dropout, causal, scale, (before, after), state)
        return dq, dk, dv, sums


def triton_flash_attn_func(
    q: Tensor,  # (batch, length, heads, width), as are keys and values
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> Tensor:
    """Attend as `flash_attn_func` does, by the first FlashAttention's kernel in Triton; ``bias`` takes no time."""
    return fused("flash_attn::triton", (q, k, v), Like(q), causal=causal)


def index_first_axis(tensor: Tensor, indices: Tensor) -> Tensor:
    """Return the rows that ``indices`` name."""
    return tensor.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Return zeros with ``values`` in the rows that ``indices`` name."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None) -> Any:
    """Return the rows that the mask ``(batch, length)`` keeps, their indices, bounds, the longest, and all lengths."""
    lengths = attention_mask.sum(-1, dtype=torch.int32)
    indices = torch.nonzero(attention_mask.flatten(), as_tuple=False).flatten()
    bounds = functional.pad(torch.cumsum(lengths, 0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, bounds, int(lengths.max()), lengths


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Return ``(batch, seqlen, ...)`` with zeros for what `unpad_input` took out."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return ``x``, (batch, length, heads, width), rotated by its positions."""
    return fused("flash_attn::rotary", (x, cos, sin), Like(x))


def apply_rotary_emb_qkv_(
    qkv: Tensor,  # (batch, length, 3, heads, width)
    cos: Tensor,
    sin: Tensor,
    *_: Any,
    **__: Any,
) -> Tensor:
    """Rotate queries and keys in place."""
    return fused("flash_attn::rotary", (qkv, cos, sin), Like(qkv))


def apply_rotary_emb_kv_(kv: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> Tensor:
    """Rotate the keys of ``(batch, length, 2, heads, width)`` in place."""
    return fused("flash_attn::rotary", (kv, cos, sin), Like(kv))


class RotaryEmbedding(torch.nn.Module):
    """Rotates queries and keys by their positions; cosines and sines are kept for the longest sequence so far."""

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        pos_idx_in_fp32: bool = True,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.pos_idx_in_fp32 = pos_idx_in_fp32
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        self.scale = None
        self._seq_len_cached = 0
        self._cos_cached = self._sin_cached = None

    def _compute_inv_freq(self, device: Any = None) -> Tensor:
        return self.base ** -(torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: Any = None) -> None:
        kept = self._cos_cached
        if kept is not None and seqlen <= self._seq_len_cached and (kept.device, kept.dtype) == (device, dtype):
            return
        self._seq_len_cached = seqlen
        angles = torch.outer(torch.arange(seqlen, device=device, dtype=torch.float32), self.inv_freq.to(device))
        self._cos_cached, self._sin_cached = angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(
        self,
        qkv: Tensor,  # (batch, length, 3, heads, width), or queries if keys and values are given apart
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Any:
        """Return what was given, rotated."""
        offset = seqlen_offset if isinstance(seqlen_offset, int) else 0
        self._update_cos_sin_cache(max_seqlen or qkv.shape[1] + offset, qkv.device, qkv.dtype)
        assert self._cos_cached is not None
        assert self._sin_cached is not None
        angles = self._cos_cached[offset:], self._sin_cached[offset:]
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, *angles)
        return apply_rotary_emb(qkv, *angles), apply_rotary_emb_kv_(kv, *angles)


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """Return ``silu(x) * y``."""
    return fused("flash_attn::swiglu", (x, y), Like(x))


def cross_entropy_loss(logits: Tensor, labels: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """Return the losses of ``(rows, classes)`` for ``(rows,)``, and the z-losses, in one kernel."""
    losses = Like(logits, (len(logits),), torch.float32)
    return fused("flash_attn::cross_entropy", (logits, labels), losses, losses)


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """Return the norm of ``x``, or of its sum with ``residual``, and with ``prenorm`` that sum too; one kernel."""
    if return_dropout_mask or any(one is not None for one in (x1, weight1, bias1, rowscale)):
        told = "layer_norm_fn: x1, weight1, bias1, rowscale and return_dropout_mask are not simulated; leave them out"
        raise NotImplementedError(told)
    inputs = tuple(one for one in (x, weight, bias, residual) if one is not None)
    if residual is None and not prenorm:
        return fused("flash_attn::layer_norm", inputs, Like(x))
    dtype = torch.float32 if residual is None and residual_in_fp32 else (x if residual is None else residual).dtype
    made = fused("flash_attn::layer_norm", inputs, Like(x), Like(x, dtype=dtype))
    return made if prenorm else made[0]


def rms_norm_fn(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any, **named: Any) -> Any:
    """Return what `layer_norm_fn` does."""
    return layer_norm_fn(x, weight, bias, *rest, **named)


class RMSNorm(torch.nn.RMSNorm):
    """RMS norm of ``hidden_size`` numbers."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, device: Any = None, dtype: Any = None, **_: Any) -> None:
        super().__init__(hidden_size, eps, device=device, dtype=dtype)

    def forward(self, x: Tensor, residual: Tensor | None = None, **named: Any) -> Any:
        """Return what `layer_norm_fn` does."""
        return layer_norm_fn(x, self.weight, None, residual, **named)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the norm of ``x``."""
    return functional.rms_norm(x, weight.shape, weight, epsilon)


class CrossEntropyLoss(torch.nn.Module):
    """Mean, sum or each of the losses of ``(rows, classes)`` for ``(rows,)``."""

    def __init__(self, ignore_index: int = -100, reduction: str = "mean", **_: Any) -> None:
        super().__init__()
        self.ignore_index, self.reduction = ignore_index, reduction

    def forward(self, input: Tensor, target: Tensor, **_: Any) -> Tensor:
        """Return the loss."""
        losses = fused("flash_attn::cross_entropy", (input, target), Like(input, (len(input),), torch.float32))
        if self.reduction == "mean":
            return losses.sum() / (target != self.ignore_index).sum()
        return losses.sum() if self.reduction == "sum" else losses


_ATTENTION = (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
submodule(f"{__name__}.flash_attn_triton", flash_attn_func=triton_flash_attn_func)
_OF_RINGS = _flash_attn_forward, _flash_attn_varlen_forward, _flash_attn_backward, _flash_attn_varlen_backward
submodule(f"{__name__}.flash_attn_interface", *_ATTENTION, *_OF_RINGS, flash_attn_gpu=_Extension)
submodule(f"{__name__}.modules.mha", *_ATTENTION)
submodule(f"{__name__}.bert_padding", index_first_axis, index_put_first_axis, unpad_input, pad_input)
submodule(
    f"{__name__}.layers.rotary",
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_func=apply_rotary_emb,
)
submodule(f"{__name__}.ops.activations", swiglu)
submodule(f"{__name__}.ops.rms_norm", RMSNorm, rms_norm)
submodule(f"{__name__}.ops.triton.cross_entropy", cross_entropy_loss)
submodule(f"{__name__}.ops.triton.layer_norm", RMSNorm, layer_norm_fn, rms_norm_fn)
submodule(f"{__name__}.losses.cross_entropy", CrossEntropyLoss)
