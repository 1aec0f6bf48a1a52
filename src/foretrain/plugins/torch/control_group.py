"""Collectives beside the gradients: agreements on small values, never pickled, and copies of rank 0's buffers.

All methods are collective and block. Agreements are made at set-up; buffers are shared before each training forward.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _take_tensors

from foretrain.comm.control_plane import ControlPlane
from foretrain.comm.options import AttachOptions
from foretrain.comm.rendezvous import agree_on_settings, hash_of
from foretrain.errors import ConfigError
from foretrain.plugins.torch.streams import enqueues, finish


class ControlGroup(ControlPlane):
    """Agreements among the ranks of ``group``; ``check`` raises the error that has ended the job, if any.

    Attributes:
        rank: of this process in the group.
        ranks: N.
        enqueues: whether the device waits for collectives, not the host, as with NCCL.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, check: Callable[[], None] = lambda: None
    ) -> None:
        self._group, self._check = group, check
        self.enqueues = enqueues(group, device)
        self._device = device if self.enqueues else torch.device("cpu")
        self.timed: Callable[[int, int, int], float] | None = None
        """Implementation of `series` for gradients that another backend sums."""
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)

    def checking(self, check: Callable[[], None]) -> ControlGroup:
        """Return the same control plane with another ``check``."""
        other = ControlGroup(self._group, self._device, check)
        other.timed = self.timed
        return other

    def share(self, data: bytes | None, source: int = 0) -> bytes:
        """Return the ``data`` of rank ``source``, on all ranks."""
        length = torch.tensor([len(data or b"")], dtype=torch.int64, device=self._device)
        self._wait(dist.broadcast(length, group=self._group, group_src=source, async_op=True))
        payload = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        if self.rank == source and data:
            payload.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._wait(dist.broadcast(payload, group=self._group, group_src=source, async_op=True))
        return bytes(payload.cpu().tolist())

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return every rank's ``values``, of equal length."""
        own = torch.tensor(list(values), dtype=torch.int64, device=self._device)
        all_of_them = [torch.empty_like(own) for _ in range(self.ranks)]
        self._wait(dist.all_gather(all_of_them, own, group=self._group, async_op=True))
        return [other.tolist() for other in all_of_them]

    def series(self, size: int, count: int, depth: int) -> float:
        """Return the ns per all-reduce of ``size`` bytes in a series of ``count`` with ``depth`` in flight."""
        if self.timed is not None:
            return self.timed(size, count, depth)
        buffers = [torch.zeros(size // 4, device=self._device) for _ in range(depth)]
        self.all_true(True)
        self._finish()
        began = time.perf_counter_ns()
        works: list[dist.Work] = []
        for k in range(count):
            if k >= depth:
                self._wait(works[k - depth])
            work = dist.all_reduce(buffers[k % depth], group=self._group, async_op=True)
            assert work is not None
            works.append(work)
        for work in works[-depth:]:
            self._wait(work)
        self._finish()
        return (time.perf_counter_ns() - began) / count

    def _wait(self, work: dist.Work | None) -> None:
        finish(work, self._check, enqueues=self.enqueues)

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


_BUCKET = 250 << 20
"""Bytes per broadcast, as in DistributedDataParallel."""


class Buffers:
    """Buffers of ``model``, copied from rank 0 over ``group``, which must be idle when a forward pass begins.

    ``check`` raises the error that has ended the job, if any. All methods are collective.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, check: Callable[[], None]) -> None:
        self._model, self._group, self._check = model, group, check
        self._due = True

    def forward_begins(self, synchronizes: bool) -> None:
        """Share buffers before a training forward pass if it is the first one, or the last one synchronised gradients.

        ``synchronizes`` says whether this one does. Sources: DistributedDataParallel's ``_pre_forward`` and its flag
        ``require_forward_param_sync``.
        """
        if self._due:
            self.share()
        self._due = synchronizes

    def share(self) -> None:
        """Broadcast rank 0's buffers now."""
        buffers = tuple(buffer for buffer in self._model.buffers() if buffer.numel())
        if buffers and dist.get_world_size(self._group) > 1:
            # A backward pass may still need buffers that an earlier forward pass saved, as with DDP.
            with torch.autograd.grad_mode._unsafe_preserve_version_counter(buffers):
                _broadcast(buffers, self._group, self._check)


def share_all(model: nn.Module, group: dist.ProcessGroup, buffers: bool, check: Callable[[], None]) -> None:
    """Copy rank 0's parameters, and with ``buffers`` its buffers, to all ranks before training."""
    tensors = [parameter.detach() for parameter in model.parameters() if parameter.numel()]
    tensors += [buffer for buffer in model.buffers() if buffer.numel()] if buffers else []
    if dist.get_world_size(group) > 1:
        _broadcast(tensors, group, check)


def _broadcast(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, check: Callable[[], None]) -> None:
    """Copy rank 0's ``tensors`` to all ranks, one bucket after another."""
    with torch.no_grad():
        for bucket in _take_tensors(tensors, _BUCKET):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            work = dist.broadcast(flat, group=group, group_src=0, async_op=True)
            finish(work, check, enqueues=enqueues(group, flat.device))
            for tensor, values in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(values.view(tensor.shape))


_BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
_TRUE = ("1", "t", "true", "y", "yes")
"""Values of environment variables that PyTorch reads as true."""


def agree_on_model(control: ControlGroup, model: nn.Module, options: AttachOptions) -> None:
    """Raise Disagreement, on all ranks, if settings, parameters or shared buffers differ."""
    agree_on_settings(control, msgspec.structs.asdict(options))
    parameters = [(name, p, "" if p.requires_grad else " frozen") for name, p in model.named_parameters()]
    buffers = [(name, buffer, "") for name, buffer in model.named_buffers() if options.broadcast_buffers]
    for what, tensors in (("parameter", parameters), ("buffer", buffers)):
        described = [f"{name} {tuple(tensor.shape)} {tensor.dtype}{frozen}" for name, tensor, frozen in tensors]
        control.must_agree(what, described, [hash_of(text) for text in described])


def refuse_blocking_waits(control: ControlGroup) -> None:
    """Raise ConfigError, on all ranks, if NCCL's waits block the host on one of them.

    A blocked runtime thread would neither read messages of other ranks nor send heartbeats.
    """
    set_here = next((name for name in _BLOCKING if os.environ.get(name, "").lower() in _TRUE), None)
    if control.enqueues and not control.all_true(set_here is None):
        name = set_here or _BLOCKING[0]
        value = os.environ.get(name, "set on another rank")
        remedy = "unset it on all ranks; a rank that is lost is noticed without it, after `timeout`"
        raise ConfigError(name, value, "makes the host wait for every collective of NCCL", remedy)
