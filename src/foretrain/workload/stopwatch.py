"""How a moment is taken: on the host's clock, or on the GPU's own, in the order of its stream.

A GPU runs behind the host, so the host's clock says when a kernel was *asked for*. A CUDA event says when it was
reached, and costs no synchronisation until it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Protocol

from foretrain.errors import RecordError
from foretrain.units import MILLISECOND, NANOSECOND, Time

if TYPE_CHECKING:
    import torch


class Stopwatch(Protocol):
    """Takes marks cheaply while a step runs, and turns them into times when it is over."""

    place: str
    """What is being timed, for people: ``"CPU (2 threads)"``."""

    def mark(self) -> Any:
        """This moment, in whatever form is cheapest."""
        ...

    def settle(self, marks: Sequence[Any]) -> list[Time]:
        """Picoseconds from the first mark to each mark, never decreasing. May wait for the device."""
        ...


class HostStopwatch:
    """The host's monotonic clock."""

    def __init__(self, threads: int) -> None:
        self.place = f"CPU ({threads} thread{'s' if threads != 1 else ''})"

    mark = staticmethod(perf_counter_ns)

    def settle(self, marks: Sequence[int]) -> list[Time]:
        """Picoseconds from the first mark to each mark."""
        return [(mark - marks[0]) * NANOSECOND for mark in marks]


class CudaStopwatch:
    """CUDA events on the stream that is current where the mark is taken, which in a gradient hook is the engine's."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._cuda, self._device = torch.cuda, device
        self.place = torch.cuda.get_device_name(device)

    def mark(self) -> torch.cuda.Event:
        """An event behind all work queued so far."""
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def settle(self, marks: Sequence[torch.cuda.Event]) -> list[Time]:
        """Picoseconds from the first mark to each mark; waits for the device once.

        An event on a side stream may be reached before one that was logged earlier on another: the running maximum
        keeps the order of the log, in which nothing ends before it begins.
        """
        self._cuda.synchronize(self._device)
        times = (round(marks[0].elapsed_time(mark) * MILLISECOND) for mark in marks[1:])
        return list(accumulate(times, max, initial=0))


def stopwatch(devices: set[torch.device]) -> Stopwatch:
    """The stopwatch for a model whose parameters live on ``devices``."""
    import torch

    if len(devices) != 1:
        shown = ", ".join(sorted(map(str, devices)))
        raise RecordError(
            f"the parameters live on {shown}; a recording is of one worker on one device: move them to one"
        )
    (device,) = devices
    if device.type == "cpu":
        return HostStopwatch(torch.get_num_threads())
    if device.type == "cuda":
        return CudaStopwatch(device)
    raise RecordError(f"the parameters live on {str(device)!r}, which has no stopwatch; move the model to cpu or cuda")
