"""RMS norm, fused as PyTorch's own is."""

from __future__ import annotations

from typing import Any

import torch


class RMSNorm(torch.nn.RMSNorm):
    """RMS norm of ``hidden_size`` numbers."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, device: Any = None, dtype: Any = None, **_: Any) -> None:
        super().__init__(hidden_size, eps, device=device, dtype=dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return the norm of ``x``."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, epsilon)
