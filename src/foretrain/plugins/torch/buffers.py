"""BatchNorm's statistics and other buffers: rank 0's, on all ranks, before each training forward pass.

DistributedDataParallel shares them when its *wrapper* is called, with gradients or without, and an evaluation on one
rank escapes by calling the model inside. Here the model itself is called, so only training communicates: an evaluation
on rank 0 alone must wait for nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from foretrain.plugins.torch.streams import enqueues
from foretrain.plugins.torch.work_wait import finish

_BUCKET = 250 << 20
"""Bytes per broadcast, DistributedDataParallel's."""


class Buffers:
    """The buffers of ``model``, shared over ``group``, which nobody else uses while a forward pass begins.

    ``check`` raises what has ended the job, if anything has. All methods are collective.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, check: Callable[[], None]) -> None:
        self._model, self._group, self._check = model, group, check
        self._due = True

    def forward_begins(self, synchronizes: bool) -> None:
        """For a forward pass that trains: broadcasts if the last one was of a synchronised step, or there was none.

        ``synchronizes`` says whether this one is. Sources: DistributedDataParallel's ``_pre_forward`` and its flag
        ``require_forward_param_sync``.
        """
        if self._due:
            self.share()
        self._due = synchronizes

    def share(self) -> None:
        """Broadcasts now."""
        buffers = tuple(buffer for buffer in self._model.buffers() if buffer.numel())
        if buffers and dist.get_world_size(self._group) > 1:
            # A backward pass may still need what an earlier forward pass saved of them; DDP does not forbid that.
            with torch.autograd.grad_mode._unsafe_preserve_version_counter(buffers):
                _broadcast(buffers, self._group, self._check)


def share_all(model: nn.Module, group: dist.ProcessGroup, buffers: bool, check: Callable[[], None]) -> None:
    """Rank 0's parameters, and its buffers where ``buffers``, on all ranks: how training begins."""
    tensors = [parameter.detach() for parameter in model.parameters() if parameter.numel()]
    tensors += [buffer for buffer in model.buffers() if buffer.numel()] if buffers else []
    if dist.get_world_size(group) > 1:
        _broadcast(tensors, group, check)


def _broadcast(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, check: Callable[[], None]) -> None:
    """The first rank's ``tensors``, on all ranks, a bucket after the other."""
    with torch.no_grad():
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            work = dist.broadcast(flat, group=group, group_src=0, async_op=True)
            finish(work, check, enqueues=enqueues(group, flat.device))
            start = 0
            for tensor in bucket:
                tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
                start += tensor.numel()


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors of one dtype on one device, up to `_BUCKET` bytes together, the same on all ranks."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    sizes: Counter[tuple[torch.device, torch.dtype]] = Counter()
    for tensor in tensors:
        kind = (tensor.device, tensor.dtype)
        alike.setdefault(kind, []).append(tensor)
        sizes[kind] += tensor.nbytes
        if sizes[kind] >= _BUCKET:
            yield alike.pop(kind)
            del sizes[kind]
    yield from alike.values()
