"""NVTX: the ranges that a script marks for a profiler are noted for the trace."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import torch.cuda.nvtx

from foretrain.live.device.patching import put


def install_nvtx(device: ModuleType) -> None:
    """Puts functions in place of those that a build without CUDA lacks."""
    handles = itertools.count(1)
    depth = 0

    def push(message: str) -> int:
        nonlocal depth
        device.annotate(str(message))
        depth += 1
        return depth - 1

    def pop() -> int:
        nonlocal depth
        device.annotate_end()
        depth = max(0, depth - 1)
        return depth

    def start(message: str) -> int:
        push(message)
        return next(handles)

    def end(handle: int) -> None:
        pop()

    def nothing(*_: Any) -> None:
        """A mark has no duration."""

    functions = {"rangePushA": push, "rangePop": pop, "rangeStartA": start, "rangeEnd": end, "markA": nothing}
    functions |= {
        "deviceRangeStart": lambda message, stream: start(message),
        "deviceRangeEnd": lambda ref, stream: end(ref),
    }
    put(torch.cuda.nvtx._nvtx, **functions)  # pyright: ignore[reportPrivateImportUsage]
