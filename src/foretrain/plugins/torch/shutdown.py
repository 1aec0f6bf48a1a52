"""Ends that come without close(): the script's own, and that of the process groups.

`optimizer.step()` returns at once, so at the end of a script the last update is nearly always under way. A script that
simply ends, or destroys its process group first, still gets it, as under DistributedDataParallel.
"""

from __future__ import annotations

import atexit
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Protocol

import torch.distributed as dist


class Closeable(Protocol):
    """What is to end in time."""

    def within(self, group: dist.ProcessGroup | None) -> bool:
        """Whether it is of no use without ``group``; None is all of them."""
        ...

    def close(self) -> None:
        """Applies everything under way, and ends."""
        ...

    def leave(self, error: BaseException | None) -> None:
        """Ends with the process, which ``error`` ends if it is not None."""
        ...

    def __exit__(self, kind: Any, error: BaseException, trace: Any) -> None:
        """Ends without waiting for anything."""
        ...


_present: list[weakref.ref[Closeable]] = []
_replaced: list[tuple[ModuleType, str]] = []
"""Where `_guarded` stands in for ``destroy_process_group``."""
_original: Callable[..., None] = dist.destroy_process_group


def enter(attachment: Closeable) -> None:
    """Sees to it that ``attachment`` ends before its group and the process do; `left` tells when it has."""
    if not _present:
        # Not at import: what the script registers before it attaches still runs after this.
        atexit.register(_exit)
        _guard_groups()
    _present.append(weakref.ref(attachment))


def left(attachment: Closeable) -> None:
    """It has ended."""
    _present[:] = [reference for reference in _present if reference() not in (attachment, None)]
    if not _present:
        atexit.unregister(_exit)
        while _replaced:
            module, name = _replaced.pop()
            if getattr(module, name, None) is _guarded:
                setattr(module, name, _original)


def _living() -> Iterator[Closeable]:
    """The last one first, on all ranks alike."""
    return (attachment for reference in reversed(_present[:]) if (attachment := reference()) is not None)


def _exit() -> None:
    for attachment in _living():
        attachment.leave(getattr(sys, "last_value", None))


def _guard_groups() -> None:
    """Scripts call ``destroy_process_group`` by whatever name they imported it under."""
    global _original, _guarded
    _original = dist.destroy_process_group
    _guarded = functools.wraps(_original)(_destroy_process_group)
    for module in [module for home, module in list(sys.modules.items()) if home != __name__]:
        for name in [name for name, value in list(getattr(module, "__dict__", {}).items()) if value is _original]:
            _replaced.append((module, name))
            setattr(module, name, _guarded)


def _destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
    # What is on its way through a `finally` must not wait for ranks that may not come.
    error = sys.exception()
    for attachment in _living():
        if attachment.within(group):
            if error is None or (isinstance(error, SystemExit) and not error.code):
                attachment.close()
            else:
                attachment.__exit__(type(error), error, error.__traceback__)
    _original(group)


_guarded: Callable[..., None] = _destroy_process_group
