"""Processes that a script starts itself: they have no GPU, and say so where they ask for one.

A simulated rank is one process, and what it starts are interpreters without a simulated GPU (or, forked, with one that
nobody listens to). Those that prepare data need none. One that is to train on a GPU is told what to do instead, before
it fails for a reason that misleads, or waits for others for ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from foretrain.errors import ConfigError
from foretrain.live.device import script
from foretrain.live.device.patching import put

_LIBRARIES = ("torch.", "multiprocessing.", "concurrent.")
"""Whose processes serve the script, e.g. as workers of a DataLoader or a pool."""


class WithoutGpu:
    """What a process of the script's own runs, which may be sent to it.

    Args:
        target: what the script has it run.
        place: file and line that start it.
    """

    def __init__(self, target: Callable[..., object], place: str) -> None:
        self._target, self._place = target, place

    def __call__(self, *args: Any, **named: Any) -> None:
        """Calls the target, which cannot have a GPU."""
        import torch
        import torch.distributed as dist

        meet = dist.init_process_group

        def refuse(*_: Any, **__: Any) -> NoReturn:
            problem = "starts a process that uses a GPU, of which the simulation does not know"
            remedy = "start none and use torchrun's RANK and LOCAL_RANK, or start them by torch.multiprocessing.spawn"
            raise ConfigError("multiprocessing.Process", self._place, problem, remedy)

        def init_process_group(backend: str | None = None, *rest: Any, **options: Any) -> None:
            if backend is None or "nccl" in backend:
                refuse()
            meet(backend, *rest, **options)

        put(torch.cuda, _lazy_init=refuse, set_device=refuse)
        for module in (dist, dist.distributed_c10d):
            put(module, init_process_group=init_process_group)
        self._target(*args, **named)


def install_child_guard() -> None:
    """Has processes that the script starts refuse to use a GPU."""
    start, owner = BaseProcess.start, os.getpid()

    def guarded(self: Any) -> None:
        target = self._target
        if os.getpid() == owner and target is not None and not _serves(target):
            frame = script.script_frame()
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "?"
            self._target = WithoutGpu(target, place)
        start(self)

    put(BaseProcess, start=guarded)


def _serves(target: Any) -> bool:
    return f"{getattr(target, '__module__', '')}.".startswith(_LIBRARIES)
