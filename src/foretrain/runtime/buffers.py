"""BatchNorm's statistics and other buffers: rank 0's, on all ranks, before each forward pass, as DDP does it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

_broadcast = dist._broadcast_coalesced  # pyright: ignore[reportPrivateImportUsage] DDP's own
_BUCKET = 250 << 20
"""Bytes per broadcast, DistributedDataParallel's."""


class Buffers:
    """The buffers of ``model``, shared over ``group``, which nobody else uses while a forward pass begins."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._model, self._group = model, group
        self._due = True

    def forward_begins(self, synchronizes: bool) -> None:
        """Broadcasts if the last forward pass was one of a synchronised training step, or none was.

        ``synchronizes`` says whether this one is. Sources: DistributedDataParallel's ``_pre_forward`` and its flag
        ``require_forward_param_sync``.
        """
        if self._due and dist.get_world_size(self._group) > 1:
            self.share()
        self._due = synchronizes

    def share(self) -> None:
        """Broadcasts now."""
        buffers = [buffer for buffer in self._model.buffers() if buffer.numel()]
        if buffers:
            with torch.no_grad():
                _broadcast(self._group, buffers, _BUCKET, 0)


def share_all(model: nn.Module, group: dist.ProcessGroup, buffers: bool) -> None:
    """Rank 0's parameters, and its buffers where ``buffers``, on all ranks: how training begins."""
    tensors = [parameter.detach() for parameter in model.parameters()]
    tensors += [buffer for buffer in model.buffers() if buffer.numel()] if buffers else []
    if tensors and dist.get_world_size(group) > 1:
        with torch.no_grad():
            _broadcast(group, tensors, _BUCKET, 0)
