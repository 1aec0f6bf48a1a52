"""Optimizers whose parameters are on the host, as with CPU offload: their steps take the host's time.

Computing on the host is otherwise free (docs/live/index.md): scripts for GPUs do little of it. An optimizer of a
billion parameters is the exception, and what offloading costs is what its users want to know.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from foretrain.units import SECOND, Time

THREAD_BANDWIDTH: Final = 10e9
"""Bytes/s that one thread of element-wise operators reads and writes: what a core of a server gets."""
RANK_BANDWIDTH: Final = 50e9
"""Bytes/s that a rank has with any number of threads: two sockets of eight channels, 410 GB/s with DDR4-3200 and 614
GB/s with DDR5-4800 (the memory of DGX A100 and H100 by NVIDIA's user guides), shared by eight ranks."""
_LEAST: Final = 1 << 20
"""Bytes of parameters below which an optimizer's step on the host is not worth counting."""


def host_bandwidth() -> float:
    """Bytes/s for the threads that the rank is given; torchrun gives one where there are several ranks."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return min(RANK_BANDWIDTH, int(threads) * THREAD_BANDWIDTH) if threads.isdecimal() else RANK_BANDWIDTH


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a distributed tensor, or a tensor that is none."""
    return getattr(tensor, "_local_tensor", tensor)


class HostOptimizerStep:
    """Charges an optimizer's step for the memory that its operators on the host read and write.

    Args:
        spend: has the rank's clock advance, ps.
        warn: tells the user.
    """

    def __init__(self, spend: Callable[[Time], None], warn: Callable[[str], None]) -> None:
        self._spend, self._warn = spend, warn
        self._traffic: _Traffic | None = None
        self._warned = False

    def begin(self, parameters: Iterable[torch.Tensor]) -> None:
        """The step of an optimizer of ``parameters`` begins."""
        if self._traffic is not None:  # The step before has failed, and the script goes on.
            self._traffic.bytes = 0
        elif sum(tensor.nbytes for tensor in parameters if tensor.device.type == "cpu") >= _LEAST:
            self._traffic = _Traffic()
            self._traffic.__enter__()

    def end(self) -> None:
        """It is over."""
        if (traffic := self._traffic) is None:
            return
        self._traffic = None
        traffic.__exit__(None, None, None)
        rate = host_bandwidth()
        self._spend(round(traffic.bytes / rate * SECOND))
        if not self._warned:
            self._warned = True
            self._warn(
                f"an optimizer's parameters are on the host: the {traffic.bytes / 1e9:.1f} GB that its step reads and "
                f"writes there are charged at an assumed {rate / 1e9:.0f} GB/s; --host measured takes this machine's"
            )


class _Traffic(TorchDispatchMode):
    """Counts the bytes of host memory that operators read and write: of distributed tensors, those of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.bytes += sum(
                local_part(value).nbytes
                for value in tree_iter((args, kwargs, result))
                if isinstance(value, torch.Tensor) and value.device.type == "cpu"
            )
        return result
