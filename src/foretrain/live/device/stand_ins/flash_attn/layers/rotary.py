"""Rotary position embedding, which the library has a kernel for."""

from __future__ import annotations

from typing import Any

import torch

from foretrain.live.device.custom_kernels import Like, fused


def apply_rotary_emb(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Return ``x``, (batch, length, heads, width), rotated by its positions."""
    return fused("flash_attn::rotary", (x, cos, sin), Like(x))
