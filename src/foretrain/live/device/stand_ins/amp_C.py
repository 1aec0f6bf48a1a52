"""Apex's extension of kernels for lists of tensors, as `apex.multi_tensor_apply` calls them."""  # noqa: N999

from __future__ import annotations

from collections.abc import Sequence

import torch


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, lists: Sequence[list[torch.Tensor]], per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of all tensors of a list, of shape ``(1,)``, and if asked that of each."""
    norms = torch.stack([norm.float() for norm in torch.ops.aten._foreach_norm(lists[0])])
    return torch.linalg.vector_norm(norms).view(1), norms if per_tensor else norms.new_empty(0)


def multi_tensor_scale(
    chunk_size: int, noop_flag: torch.Tensor, lists: Sequence[list[torch.Tensor]], scale: float
) -> None:
    """Write the first list times ``scale`` to the second; the time is that of scaling the second."""
    torch.ops.aten._foreach_mul_(lists[1], scale)
