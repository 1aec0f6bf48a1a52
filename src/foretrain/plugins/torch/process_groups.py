"""Process groups of an attachment, and its close when a script ends or destroys its groups without close().

`optimizer.step()` returns at once, so at the end of a script the last update is nearly always in flight. A script that
simply ends, or destroys its process group first, still gets it, as under DistributedDataParallel.

Beside the gradients, ranks agree on small values, never pickled, and copy rank 0's buffers (`ControlGroup`, `Buffers`).
All of that is collective and blocks. Agreements are made at set-up; buffers are shared before each training forward.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch._utils import _take_tensors

from foretrain.comm.control_plane import ControlPlane
from foretrain.comm.options import AttachOptions
from foretrain.comm.rendezvous import agree_on_settings, hash_of
from foretrain.errors import ConfigError
from foretrain.plugins.torch.streams import abort, enqueues, finish

logger = logging.getLogger("foretrain")


class Groups:
    """Two groups of the same ranks and backend as ``parent``, for the runtime alone. Making them is collective.

    Collectives of one group must be issued in one order, which the model's own collectives would break.

    Args:
        parent: the ranks that train; None is all of them.
        stall_timeout: seconds after which a collective is given up.
        device: of the model.

    Attributes:
        gradients: for gradients.
        control: for everything else.
    """

    def __init__(self, parent: dist.ProcessGroup | None, stall_timeout: float, device: torch.device) -> None:
        self._parent, self._device = parent, device
        backend, limit = _backend(parent), timedelta(seconds=stall_timeout)
        if parent is None or dist.get_world_size(parent) == dist.get_world_size():
            made = [dist.new_group(timeout=limit, backend=backend) for _ in range(2)]
        else:
            made = [_subgroup(parent, backend, limit, device) for _ in range(2)]
        gradients, control = made
        assert isinstance(gradients, dist.ProcessGroup)
        assert isinstance(control, dist.ProcessGroup)
        self.gradients, self.control = gradients, control

    def depends_on(self, group: dist.ProcessGroup | None) -> bool:
        """Return whether the ranks train in ``group``; None is all groups."""
        return group is None or group in (dist.group.WORLD, self._parent)

    def gathered(self, values: Sequence[int], timeout: float) -> list[list[int]] | None:
        """Return every rank's ``values``, of equal length; None if that takes ``timeout`` s, or a rank has gone."""
        own = torch.tensor(list(values), dtype=torch.int64)
        rows = [torch.empty_like(own) for _ in range(dist.get_world_size(self.control))]
        try:
            work = dist.all_gather(rows, own, group=self.control, async_op=True)
            if work is not None:
                work.wait(timedelta(seconds=timeout))
        except (RuntimeError, ValueError) as error:
            logger.debug("not all ranks said what they have lost: %s", error)
            return None
        return [row.tolist() for row in rows]

    def release(self, timeout: float, *, together: bool = True) -> None:
        """Destroy the groups, with ``together`` after a barrier of all ranks; keep them if that takes ``timeout`` s."""
        try:
            work = dist.barrier(group=self.control, async_op=True) if together else None
            if work is not None:
                work.wait(timedelta(seconds=timeout))
        except (RuntimeError, ValueError) as error:
            logger.debug("not all ranks closed: %s", error)
            return
        with contextlib.suppress(ValueError):  # the script has destroyed all groups already
            for group in (self.gradients, self.control):
                dist.destroy_process_group(group)

    def abort(self) -> None:
        """Abort what is enqueued on the device; see `foretrain.plugins.torch.streams.abort`."""
        abort(self._device, self.gradients, self.control)

    def prevent_destruction(self) -> None:
        """Keep the groups from being destroyed; see Note [Destruction]."""
        prevent_destruction(self.gradients, self.control)


# Note [Destruction]
# gloo's destructor waits for its threads with Python's lock held. They may wait for a rank that is stopped, as long as
# a collective may take, while a failed process must end at once. Or they wait for the lock, for ever: since PyTorch
# 2.13 all that is reduced during a backward pass keeps Python's context (torch.autograd.graph._engine_run_backward),
# and where a thread is the last that has it when the group dies, as after DistributedDataParallel, the process hangs.


def prevent_destruction(*groups: dist.ProcessGroup) -> None:
    """Keep ``groups`` from being destroyed before the process ends; see Note [Destruction]."""
    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _backend(parent: dist.ProcessGroup | None) -> str:
    """Return the backend of ``parent``, as one name if all devices have the same.

    `dist.get_backend` says "undefined" where init_process_group was left to choose. And a list such as
    "cpu:gloo,cuda:gloo" makes a group without a default backend as soon as any backend plugin is registered (importing
    torch._dynamo registers one), of which PyTorch warns when the group is destroyed ("No backend of type 0").
    """
    config = dist.get_backend_config(parent)
    names = {pair.rpartition(":")[2] for pair in config.split(",")}
    return names.pop() if len(names) == 1 else config


def _subgroup(group: dist.ProcessGroup, backend: str, limit: timedelta, device: torch.device) -> dist.ProcessGroup:
    """Return another group of the ranks of ``group``, made by them alone.

    ``new_group(use_local_synchronization=True)`` would name it by how many groups a process has, which differs between
    processes in different groups, and repeats after one was destroyed. Here its first rank numbers it.
    """
    ranks, store = dist.get_process_group_ranks(group), c10d._get_default_store()
    control = ControlGroup(group, device)
    number = str(store.add("foretrain/groups", 1)) if control.rank == 0 else ""
    name = f"foretrain-{control.share(number.encode()).decode()}"
    made, _ = c10d._new_process_group_helper(
        len(ranks), control.rank, ranks, backend, store, c10d.GroupName(name), timeout=limit
    )
    assert isinstance(made, dist.ProcessGroup)
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made


class Closeable(Protocol):
    """Attachment that must be closed before its process group or the process ends."""

    def depends_on(self, group: dist.ProcessGroup | None) -> bool:
        """Return whether it cannot go on without ``group``; None is all groups."""
        ...

    def close(self) -> None:
        """Apply everything in flight and close."""
        ...

    def close_at_exit(self, error: BaseException | None) -> None:
        """Close before the process ends, which is because of ``error`` if given."""
        ...

    def __exit__(self, kind: Any, error: BaseException, trace: Any) -> None:
        """Close without waiting."""
        ...


_attachments: list[weakref.ref[Closeable]] = []
_replaced: list[tuple[ModuleType, str]] = []
"""Modules and names whose ``destroy_process_group`` is `_guarded`."""
_original: Callable[..., None] = dist.destroy_process_group


def close_before_exit(attachment: Closeable) -> None:
    """Close ``attachment`` before its process group or the process ends, unless `forget_closed` was called before."""
    if not _attachments:
        # Not at import: functions that the script registers before it attaches must run after this one.
        atexit.register(_exit)
        _guard_groups()
    _attachments.append(weakref.ref(attachment))


def forget_closed(attachment: Closeable) -> None:
    """Take a closed attachment off the list."""
    _attachments[:] = [reference for reference in _attachments if reference() not in (attachment, None)]
    if not _attachments:
        atexit.unregister(_exit)
        while _replaced:
            module, name = _replaced.pop()
            if getattr(module, name, None) is _guarded:
                setattr(module, name, _original)


def _living() -> Iterator[Closeable]:
    """Return the living attachments, the last one first, on all ranks alike."""
    return (attachment for reference in reversed(_attachments[:]) if (attachment := reference()) is not None)


def _exit() -> None:
    for attachment in _living():
        attachment.close_at_exit(getattr(sys, "last_value", None))


def _guard_groups() -> None:
    """Replace ``destroy_process_group`` in all modules, under whatever name they imported it."""
    global _original, _guarded
    _original = dist.destroy_process_group
    _guarded = functools.wraps(_original)(_destroy_process_group)
    for module in [module for home, module in list(sys.modules.items()) if home != __name__]:
        for name in [name for name, value in list(getattr(module, "__dict__", {}).items()) if value is _original]:
            _replaced.append((module, name))
            setattr(module, name, _guarded)


def _destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
    # In a `finally` after an error, other ranks may never come: do not wait for them.
    error = sys.exception()
    for attachment in _living():
        if attachment.depends_on(group):
            if error is None or (isinstance(error, SystemExit) and not error.code):
                attachment.close()
            else:
                attachment.__exit__(type(error), error, error.__traceback__)
    _original(group)


_guarded: Callable[..., None] = _destroy_process_group


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
