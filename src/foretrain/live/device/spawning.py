"""``torch.multiprocessing.spawn`` in a script that starts a process for each GPU of its server itself.

A simulation has started one for each rank already, and each of them runs the script from its beginning. So where the
script would start its processes, a rank becomes the one of its own GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch.multiprocessing

from foretrain.errors import ConfigError
from foretrain.live.device.patching import put
from foretrain.live.device.settings import RankSettings


class JoinedProcesses:
    """``torch.multiprocessing.ProcessContext`` of processes that have ended."""

    processes: tuple[Any, ...] = ()

    def pids(self) -> list[int]:
        """There are none."""
        return []

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """All have ended."""
        return True


def install_spawn(settings: RankSettings, rank: int) -> None:
    """Has ``spawn`` and ``start_processes`` call the function for the GPU of ``rank``, in this process."""
    local, here = rank % settings.gpus, int(settings.environment(rank)["LOCAL_WORLD_SIZE"])
    owner = os.getpid()

    def start_processes(
        fn: Callable[..., object],
        args: Sequence[Any] = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
    ) -> JoinedProcesses | None:
        if os.getpid() != owner:
            raise RuntimeError("torch.multiprocessing.spawn: a child of a simulated rank has no GPU to start it for")
        if nprocs != here:
            remedy = "start one for each of torch.cuda.device_count(), or name a cluster with so many GPUs"
            problem = f"is not one process for each of the server's {here} simulated GPUs"
            raise ConfigError("torch.multiprocessing.spawn nprocs", nprocs, problem, remedy)
        fn(local, *args)
        return None if join else JoinedProcesses()

    # `torch.multiprocessing.spawn` is the function, which hides the module of the same name.
    for module in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        put(module, spawn=start_processes, start_processes=start_processes)
