"""Optimizers whose step is one kernel for many tensors."""

from __future__ import annotations

from typing import Any

import torch


class FusedAdam(torch.optim.Adam):
    """Adam, or AdamW."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        **_: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, fused=True, decoupled_weight_decay=adam_w_mode)


class FusedSGD(torch.optim.SGD):
    """SGD with momentum."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **_: Any,
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, fused=True)
