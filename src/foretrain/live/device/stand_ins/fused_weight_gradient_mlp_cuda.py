"""Apex's extension by which Megatron-LM adds a weight's gradient to a buffer in the product that computes it."""

from __future__ import annotations

import torch

from foretrain.live.device.stand_ins.te_kernels import add_weight_gradient


def wgrad_gemm_accum_fp32(x: torch.Tensor, gradient: torch.Tensor, buffer: torch.Tensor) -> None:
    """Add the product of ``gradient (m, n)``, turned, and ``x (m, k)`` to a buffer of fp32 ``(n, k)``."""
    add_weight_gradient(buffer, gradient.flatten(0, -2), x.flatten(0, -2))


def wgrad_gemm_accum_fp16(x: torch.Tensor, gradient: torch.Tensor, buffer: torch.Tensor) -> None:
    """Do the same with a buffer of the operands' type."""
    add_weight_gradient(buffer, gradient.flatten(0, -2), x.flatten(0, -2))
