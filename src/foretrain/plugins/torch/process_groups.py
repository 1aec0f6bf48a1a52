"""Process groups of an attachment, and its close when a script ends or destroys its groups without close().

`optimizer.step()` returns at once, so at the end of a script the last update is nearly always in flight. A script that
simply ends, or destroys its process group first, still gets it, as under DistributedDataParallel.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from foretrain.plugins.torch.control_group import ControlGroup
from foretrain.plugins.torch.streams import abort

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
