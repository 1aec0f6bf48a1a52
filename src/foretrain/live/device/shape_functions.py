"""Shape functions of CUDA's operators that PyTorch lacks: what they return, on device "meta".

Some are of operators that only GPUs have: fused recurrent cells, the batch norm whose statistics several GPUs share,
and float8 products into a given tensor. Recurrent networks run cell by cell, as on a GPU without cuDNN. Others have
kernels for CPU and GPU, but no shape function in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor


def install() -> torch.library.Library:
    """Register shape functions that PyTorch lacks; they live as long as the returned library."""
    library = torch.library.Library("aten", "IMPL", "Meta")
    for name, shape in _SHAPES.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            library.impl(name, shape)
    return library


def _statistics_of(tensor: Tensor) -> Tensor:
    """Return one number a channel, in single precision if the input has less."""
    kind = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
    return tensor.new_empty(tensor.shape[1], dtype=kind)


def _batch_norm_stats(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _statistics_of(x), _statistics_of(x)


def _batch_norm_elemt(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _batch_norm_backward_reduce(
    grad_out: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, *wanted: bool
) -> tuple[Tensor | None, ...]:
    sums, weights, biases = wanted
    of_weight = weight if weight is not None else mean
    return (
        torch.empty_like(mean) if sums else None,
        torch.empty_like(mean) if sums else None,
        torch.empty_like(of_weight) if weights else None,
        torch.empty_like(of_weight) if biases else None,
    )


def _batch_norm_backward_elemt(grad_out: Tensor, x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _gru_cell(input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hx), hx.new_empty(hx.shape[0], 5 * hx.shape[1])


def _gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    batch, hidden = grad_hy.shape
    gates = [workspace.new_empty(batch, 3 * hidden) for _ in range(2)]
    biases = [workspace.new_empty(3 * hidden) if has_bias else None for _ in range(2)]
    return *gates, torch.empty_like(grad_hy), *biases


def _scaled_product(left: Tensor, right: Tensor, *_: Any, out: Tensor, **__: Any) -> Tensor:
    return out.resize_(left.shape[0], right.shape[1])


def _like_first(first: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(first)


def _contiguous(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _like_second(_: Tensor, second: Tensor, *__: Any, **___: Any) -> Tensor:
    return torch.empty_like(second)


def _binomial(count: Tensor, prob: Tensor, generator: Any = None) -> Tensor:
    return count.new_empty(torch.broadcast_shapes(count.shape, prob.shape))


def _with_mask(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _learned_scale_backward(
    grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(scale), torch.empty_like(zero_point)


def _householder_qr(a: Tensor) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.mT.shape).mT, a.new_empty(*a.shape[:-2], min(a.shape[-2:]))


def _linear_combination(x: Tensor, coefficients: Tensor) -> Tensor:
    return x.new_empty(coefficients.shape[0], *x.shape[1:])


def _heads_of_projection(qkv: Tensor, bias: Tensor, heads: int) -> tuple[Tensor, ...]:
    batch, sequence, width = qkv.shape
    return tuple(qkv.new_empty(batch, heads, sequence, width // 3 // heads) for _ in range(3))


_SHAPES: dict[str, Callable[..., Any]] = {
    "batch_norm_stats": _batch_norm_stats,
    "batch_norm_gather_stats": _batch_norm_stats,
    "batch_norm_gather_stats_with_counts": _batch_norm_stats,
    "batch_norm_elemt": _batch_norm_elemt,
    "batch_norm_backward_reduce": _batch_norm_backward_reduce,
    "batch_norm_backward_elemt": _batch_norm_backward_elemt,
    "_scaled_mm.out": _scaled_product,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
    "_transform_bias_rescale_qkv": _heads_of_projection,
    "_masked_softmax": _like_first,
    "_masked_softmax_backward": _like_first,
    "_logcumsumexp": _contiguous,
    "_compute_linear_combination": _linear_combination,
    "geqrf": _householder_qr,
    "glu_jvp": _like_first,
    "multi_margin_loss_backward": _like_second,
    "multilabel_margin_loss_backward": _like_second,
    "fractional_max_pool3d_backward": _like_second,
    "binomial": _binomial,
    "_sample_dirichlet": _like_first,
    "_dirichlet_grad": _like_first,
    "_standard_gamma_grad": _like_first,
    "fake_quantize_per_tensor_affine_cachemask": _with_mask,
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": _with_mask,
    "fake_quantize_per_channel_affine_cachemask": _with_mask,
    "_fake_quantize_learnable_per_tensor_affine": _like_first,
    "_fake_quantize_learnable_per_channel_affine": _like_first,
    "_fake_quantize_learnable_per_tensor_affine_backward": _learned_scale_backward,
    "_fake_quantize_learnable_per_channel_affine_backward": _learned_scale_backward,
}
