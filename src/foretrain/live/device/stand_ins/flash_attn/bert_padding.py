"""Padding taken out of batches and put in again, by indices."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

Tensor = torch.Tensor


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
