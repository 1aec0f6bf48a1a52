"""Cross-entropy of logits, which the library has a kernel for."""

from __future__ import annotations

from typing import Any

import torch

from foretrain.live.device.custom_kernels import Like, fused


class CrossEntropyLoss(torch.nn.Module):
    """Mean, sum or each of the losses of ``(rows, classes)`` for ``(rows,)``."""

    def __init__(self, ignore_index: int = -100, reduction: str = "mean", **_: Any) -> None:
        super().__init__()
        self.ignore_index, self.reduction = ignore_index, reduction

    def forward(self, input: torch.Tensor, target: torch.Tensor, **_: Any) -> torch.Tensor:
        """Return the loss."""
        losses = fused("flash_attn::cross_entropy", (input, target), Like(input, (len(input),), torch.float32))
        if self.reduction == "mean":
            return losses.sum() / (target != self.ignore_index).sum()
        return losses.sum() if self.reduction == "sum" else losses
