"""How long something takes on a device, without what the measuring itself takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

_SPIN = 10_000_000
"""Cycles that a GPU is kept busy, 5 to 8 ms, while the host queues what is timed."""
_FILLED = 4e-3
"""Seconds that queueing may take within that."""
_LONG = 0.02
"""Seconds of calls timed at once beyond which more would tell no more."""
_MOST = 20


class OperatorTimer(Protocol):
    """Times calls on one kind of device."""

    def seconds(self, run: Callable[[], object], count: int) -> float:
        """What each of ``count`` calls, one behind the other, takes."""
        ...

    def repeats(self, run: Callable[[], object]) -> int:
        """How many calls to time at once."""
        ...


class CpuStopwatch:
    """Operators on the CPU: single calls by the performance counter, which costs 0.1 us."""

    def seconds(self, run: Callable[[], object], count: int) -> float:
        """As `OperatorTimer`."""
        began = time.perf_counter()
        for _ in range(count):
            run()
        return (time.perf_counter() - began) / count

    def repeats(self, run: Callable[[], object]) -> int:
        """One, so that a call finds its arguments where a program would: out of the nearest cache."""
        return 1


class CudaOperatorTimer:
    """Operators on a GPU: between two events, queued behind a kernel that spins, so that no launch is waited for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def seconds(self, run: Callable[[], object], count: int) -> float:
        """As `OperatorTimer`."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            torch.cuda._sleep(_SPIN)
            self._begin.record()
            for _ in range(count):
                run()
            self._end.record()
            self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1e3 / count

    def repeats(self, run: Callable[[], object]) -> int:
        """As many as the host queues while the GPU spins; what takes long or synchronizes by itself is timed alone."""
        torch.cuda.synchronize(self._device)
        began = time.perf_counter()
        run()
        queued = time.perf_counter() - began
        torch.cuda.synchronize(self._device)
        took = time.perf_counter() - began
        return max(1, min(_MOST, int(_FILLED / max(queued, 1e-6)), int(_LONG / max(took, 1e-6))))


def stopwatch(device: torch.device) -> OperatorTimer:
    """That of ``device``."""
    return CudaOperatorTimer(device) if device.type == "cuda" else CpuStopwatch()
