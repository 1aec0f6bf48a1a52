"""Products of grouped_gemm, and its permutation of tokens, on PyTorch's own kernel of grouped products."""

from __future__ import annotations

from typing import Any

import torch

from foretrain.live.device.custom_kernels import Like, fused
from foretrain.live.device.stand_ins import submodule

__version__ = "1.1.4"

Tensor = torch.Tensor


def gmm(
    a: Tensor,  # (rows, k): those of each expert one behind the other
    b: Tensor,  # (experts, k, n), or (experts, n, k) with trans_b
    batch_sizes: Tensor,  # rows of each expert, on the host
    trans_b: bool = False,
    **_: Any,
) -> Tensor:
    """Multiply the rows of each expert by its matrix; return ``(rows, n)``."""
    ends = batch_sizes.cumsum(0).to(a.device, torch.int32, non_blocking=True)
    return torch.ops.aten._grouped_mm(a, b.transpose(-2, -1) if trans_b else b, ends)


def permute(
    input_act: Tensor,  # (tokens, width)
    indices: Tensor,  # (tokens,) or (tokens, k): experts that tokens go to
    num_out_tokens: int | None = None,
    max_token_num: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the tokens sorted by their experts, and for `unpermute` where each has gone."""
    rows = num_out_tokens or indices.numel()
    moved = fused("grouped_gemm::permute", (input_act, indices), Like(input_act, (rows, *input_act.shape[1:])))
    return moved, indices.new_empty(indices.numel(), dtype=torch.int32)


def unpermute(input_act: Tensor, row_id_map: Tensor, probs: Tensor | None = None) -> Tensor:
    """Return the tokens in the order that they had, summed over their experts with ``probs`` ``(tokens, k)``."""
    tokens = len(row_id_map) if probs is None else len(probs)
    inputs = (input_act, row_id_map) if probs is None else (input_act, row_id_map, probs)
    return fused("grouped_gemm::unpermute", inputs, Like(input_act, (tokens, *input_act.shape[1:])))


submodule(f"{__name__}.ops", gmm, permute, unpermute)
