"""Collectives beside the gradients: agreements on small values, never pickled, and copies of rank 0's buffers.

All methods are collective and block. Agreements are made at set-up; buffers are shared before each training forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _take_tensors

from foretrain.errors import ConfigError, Disagreement
from foretrain.plugins.torch.streams import enqueues
from foretrain.plugins.torch.work_wait import finish
from foretrain.schedule import CostModel
from foretrain.units import COST_SHIFT, MICROSECOND, NANOSECOND, Time

_SMALL, _LARGE = 4 << 10, 1 << 20
"""Bytes of the timed operations."""
_SERIES = 150e6
"""Nanoseconds that a series of large operations should take."""
_HAND_OVER: Time = 100 * MICROSECOND
"""Least time to hand over an operation."""
_HAND_OVERS = 4
"""Hand-overs that take as long as the smallest operation of two ranks; both wake threads."""
_WORK = 3
"""CPU time of an operation in this runtime over that of the smallest alone: it is ordered, awaited and used as well."""
_TURN: Time = 500 * MICROSECOND
"""Time from the end of an operation to the start of one that waits for its credit: three threads, two processes."""


class ControlGroup:
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
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)

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

    def all_true(self, value: bool) -> bool:
        """Return whether ``value`` is true on all ranks."""
        return all(row[0] for row in self.gather([int(value)]))

    def raise_on_all(self, error: ConfigError | None) -> None:
        """Raise, on all ranks, the ``error`` of the first rank that has one, with the number of that rank.

        A rank that raised alone would leave the others waiting in their next collective.
        """
        failing = [rank for rank, (failed,) in enumerate(self.gather([int(error is not None)])) if failed]
        if not failing:
            return
        parts = (error.field, str(error.value), error.problem, error.remedy) if error is not None else ()
        text = self.share(msgspec.json.encode(parts), failing[0])
        field, value, problem, remedy = msgspec.json.decode(text, type=tuple[str, str, str, str])
        raise ConfigError(field, value, f"{problem} (on rank {failing[0]})", remedy)

    def must_agree(self, what: str, names: Sequence[str], hashes: Sequence[int]) -> None:
        """Raise Disagreement, on all ranks, naming the first of ``names`` whose hash differs."""
        counts = [row[0] for row in self.gather([len(hashes)])]
        if len(set(counts)) > 1:
            numbers = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts))
            raise Disagreement(f"the ranks have {what}s in different numbers: {numbers}")
        rows = self.gather(hashes)
        for place, name in enumerate(names):
            differing = [rank for rank, row in enumerate(rows) if row[place] != rows[0][place]]
            if differing:
                raise Disagreement(
                    f"{what} {name!r} (of rank {self.rank}) differs on rank {differing[0]} from rank 0's"
                )

    def cost(self, crowding: float = 0.0) -> CostModel:
        """Return the measured cost of an all-reduce, the same on all ranks.

        Args:
            crowding: share of an operation's work that delays the computation, because no core is free for it.

        κ is that of large operations, two in flight; floor and latency are of the smallest, two in flight and alone.
        θ is what this runtime itself takes to hand an operation over, because gloo's own is hidden behind the bytes; it
        is a share of the floor, which has N − 1 times as many rounds as that of two ranks.
        """
        if self.ranks == 1:
            return CostModel(NANOSECOND, 1)
        (first,) = max(self.gather([int(self._series(_LARGE, 2, 2))]))
        count = max(4, min(32, int(_SERIES / first)))
        large = median(self._series(_LARGE, count, 2) for _ in range(3))
        cpu = time.process_time_ns()
        small = median(self._series(_SMALL, 12, 2) for _ in range(5))
        cpu = (time.process_time_ns() - cpu) // (12 * 5)
        alone = median(self._series(_SMALL, 6, 1) for _ in range(5))
        own = [int(large * NANOSECOND * 2**COST_SHIFT / _LARGE), int(small), int(alone), cpu]
        per_byte, small, alone, cpu = max(self.gather(own))
        hand_over = max(_HAND_OVER, small * NANOSECOND // (_HAND_OVERS * (self.ranks - 1)))
        return CostModel(
            overhead=hand_over + round(crowding * _WORK * cpu) * NANOSECOND,
            per_byte=max(1, per_byte),
            latency=max(0, alone - small) * NANOSECOND + _TURN,
            floor=small * NANOSECOND,
        )

    def _series(self, size: int, count: int, depth: int) -> float:
        """Return the ns per all-reduce of ``size`` bytes in a series of ``count`` with ``depth`` in flight."""
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
