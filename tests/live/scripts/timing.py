"""Time of the simulated GPU, for other scripts."""

from collections.abc import Callable

import torch


def seconds(call: Callable[[], object]) -> float:
    """What the GPU takes for ``call``."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
