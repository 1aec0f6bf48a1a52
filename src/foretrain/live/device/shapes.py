"""Shape functions that PyTorch lacks of operators that only GPUs have: of fused recurrent cells, of the batch norm
whose statistics several GPUs share, and of float8 products into a given tensor.

Recurrent networks run cell by cell here, as on a GPU without cuDNN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor


def install_shapes() -> torch.library.Library:
    """Registers them; they live as long as what is returned."""
    library = torch.library.Library("aten", "IMPL", "Meta")
    for name, shape in _SHAPES.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            library.impl(name, shape)
    return library


def _statistics_of(tensor: Tensor) -> Tensor:
    """One number a channel, in single precision if the input has less."""
    kind = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
    return tensor.new_empty(tensor.shape[1], dtype=kind)


def _batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _statistics_of(x), _statistics_of(x)


def _batch_norm_gather_stats(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
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


_SHAPES: dict[str, Callable[..., Any]] = {
    "batch_norm_stats": _batch_norm_stats,
    "batch_norm_gather_stats": _batch_norm_gather_stats,
    "batch_norm_gather_stats_with_counts": _batch_norm_gather_stats,
    "batch_norm_elemt": _batch_norm_elemt,
    "batch_norm_backward_reduce": _batch_norm_backward_reduce,
    "batch_norm_backward_elemt": _batch_norm_backward_elemt,
    "_scaled_mm.out": _scaled_product,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}
