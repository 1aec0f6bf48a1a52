"""FlexAttention as the one kernel that it is compiled to, with the time of causal attention.

Which blocks a mask leaves out is a value on the GPU, which there is not; training masks are causal as a rule, and those
of windows and documents leave out more. Eager PyTorch would build the whole matrix of scores instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def install_flex() -> None:
    """Registers the operators' kernels for CUDA. Imports little, but late: most scripts do not use them."""
    from torch._C import DispatchKey
    from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward

    flex_attention.py_impl(DispatchKey.CUDA)(_flex_forward)
    flex_attention_backward.py_impl(DispatchKey.CUDA)(_flex_backward)


def _flex_forward(
    query: torch.Tensor,  # (batch, heads, sequence, width); key and value may have fewer heads
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Any,
    block_mask: tuple[Any, ...],
    scale: float,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
    attended = _attention(query, key, value, scale)[0]
    output = _like(query, (*query.shape[:-1], value.shape[-1]))
    if attended.stride() == output.stride():
        output = attended
    return output, logsumexp, torch.empty_like(logsumexp)


def _flex_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    grad_out: torch.Tensor | None,
    grad_logsumexp: torch.Tensor | None,
    fw_graph: Any,
    joint_graph: Any,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: Sequence[Any] = (),
    mask_mod_other_buffers: Sequence[Any] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor | None, ...]]:
    gradient = out if grad_out is None else grad_out
    _attention_backward(gradient, query, key, value, out, logsumexp, scale)
    captured = tuple(torch.zeros_like(one) if torch.is_tensor(one) else None for one in score_mod_other_buffers)
    return _like(query, query.shape), _like(key, key.shape), _like(value, value.shape), captured


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Any:
    if _half(q):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True, scale=scale)


def _attention_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    scale: float,
) -> None:
    aten, random = torch.ops.aten, torch.empty((), dtype=torch.int64, device=q.device)
    if _half(q):
        lengths = None, None, q.shape[2], k.shape[2]
        aten._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, logsumexp, *lengths, 0.0, True, random, random, scale=scale
        )
    else:
        wanted = [True, True, True, False]
        aten._scaled_dot_product_efficient_attention_backward(
            gradient, q, k, v, None, out, logsumexp, random, random, 0.0, wanted, True, scale=scale
        )


def _half(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)


def _like(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Empty, of ``shape``, with its dimensions in the order in memory that ``tensor`` has."""
    order = sorted(range(len(shape)), key=lambda dim: (tensor.stride(dim), -dim), reverse=True)
    return tensor.new_empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])
