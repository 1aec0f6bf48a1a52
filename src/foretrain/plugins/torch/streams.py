"""Whose turn it is on the device: on a GPU every hand-over between threads is an event between streams as well.

    compute ── ready(task) ──▶ issue ── collective ──▶ arrival ── landed(tasks) ──▶ update ── updated(tasks) ──▶ compute
    compute ── asked(): step() was called ──────────────────────────────────────▶ update

No host waits for the device here. On a CPU, where what a call returns is done, all of this is nothing.

# Note [Arrivals do not wait for updates]
An update must come after everything that was enqueued before step(), or it would write into parameters that are still
read: by the end of the backward pass, or by a script that logs their norms. Credit must not wait for that, because the
host is far ahead of the device and communication would stop until the backward pass is over. So what waits for
collectives and gives credit back has a stream of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist


class HostStreams:
    """A CPU: nothing to hand over.

    Attributes:
        enqueues: whether what returns is only enqueued, so that each stream that needs it must `acquire` it.
    """

    enqueues = False

    def ready(self, task: int) -> None:
        """The gradient of ``task`` is in its buffer."""

    def issuing(self, tasks: Iterable[int]) -> AbstractContextManager[object]:
        """Inside, collectives see the gradients of ``tasks``. On threads of the runtime only."""
        return nullcontext()

    def arriving(self) -> AbstractContextManager[object]:
        """Inside, collectives are waited for and results unpacked. On threads of the runtime only."""
        return nullcontext()

    def arrived(self) -> torch.cuda.Event | None:
        """A mark behind what has arrived so far; None where that is already done."""
        return None

    def landed(self, tasks: Iterable[int], mark: torch.cuda.Event | None) -> None:
        """The sums of ``tasks`` are there at ``mark``, of `arrived`."""

    def asked(self, settings: Iterable[torch.Tensor]) -> torch.cuda.Event | None:
        """step() is called: a mark behind what the caller's stream does first. ``settings`` are the update's own."""
        return None

    def updating(self, tasks: Sequence[int], asked: torch.cuda.Event | None) -> AbstractContextManager[object]:
        """Inside, work follows the sums of ``tasks`` and all that was asked for before step(). On own threads only."""
        return nullcontext()

    def updated(self, tasks: Iterable[int]) -> None:
        """The parameters of ``tasks`` have been given their updates, inside `updating`."""

    def acquire(self, tasks: Iterable[int]) -> None:
        """The caller's stream may use the sums and parameters of ``tasks`` from here on."""

    def acquire_all(self) -> None:
        """The caller's stream may use all gradients and parameters from here on."""

    def at_home(self) -> bool:
        """Return whether the caller's stream is the one that step() was called on: what it acquired, all may use."""
        return True


class CudaStreams(HostStreams):
    """One GPU: streams for issuing, arrivals and updates beside the streams of the model.

    Args:
        device: where the model is.
        count: tasks.
    """

    enqueues = True

    def __init__(self, device: torch.device, count: int) -> None:
        self._device = device
        self._issue = torch.cuda.Stream(device, priority=-1)
        self._arrival = torch.cuda.Stream(device, priority=-1)
        self._update = torch.cuda.Stream(device)
        self._home = torch.cuda.current_stream(device)
        self._ready = [torch.cuda.Event() for _ in range(count)]
        self._marks: list[torch.cuda.Event | None] = [None] * count
        """Behind the last write to each task's sum or parameter."""

    def ready(self, task: int) -> None:
        """Marks the autograd engine's stream, on which gradient hooks run."""
        self._ready[task].record(torch.cuda.current_stream(self._device))

    def issuing(self, tasks: Iterable[int]) -> AbstractContextManager[object]:
        """The issue stream, behind the backward pass of ``tasks``."""
        for task in tasks:
            self._issue.wait_event(self._ready[task])
        return self._entered(self._issue)

    def arriving(self) -> AbstractContextManager[object]:
        """The arrival stream."""
        return self._entered(self._arrival)

    def arrived(self) -> torch.cuda.Event | None:
        """An event; the host waits for it only where credit returns."""
        event = torch.cuda.Event(blocking=True)
        event.record(self._arrival)
        return event

    def landed(self, tasks: Iterable[int], mark: torch.cuda.Event | None) -> None:
        """One event serves the whole chunk; of a task's pieces the last counts."""
        for task in tasks:
            self._marks[task] = mark

    def asked(self, settings: Iterable[torch.Tensor]) -> torch.cuda.Event | None:
        """Marks the current stream, and keeps the memory of ``settings`` until the update stream has read them."""
        self._home = torch.cuda.current_stream(self._device)
        for value in settings:
            if value.is_cuda:
                value.record_stream(self._update)
        event = torch.cuda.Event()
        event.record(self._home)
        return event

    def updating(self, tasks: Sequence[int], asked: torch.cuda.Event | None) -> AbstractContextManager[object]:
        """The update stream, behind both."""
        for event in {self._marks[task] for task in tasks} | {asked}:
            if event is not None:
                self._update.wait_event(event)
        return self._entered(self._update)

    def updated(self, tasks: Iterable[int]) -> None:
        """One event serves the whole batch."""
        event = torch.cuda.Event()
        event.record(self._update)
        for task in tasks:
            self._marks[task] = event

    def acquire(self, tasks: Iterable[int]) -> None:
        """Makes the current stream wait, not the host."""
        stream = torch.cuda.current_stream(self._device)
        for event in {self._marks[task] for task in tasks}:
            if event is not None:
                stream.wait_event(event)

    def acquire_all(self) -> None:
        """Makes the current stream wait for everything that arrived and was updated."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_stream(self._arrival)
        stream.wait_stream(self._update)

    def at_home(self) -> bool:
        """Streams that follow that one are the script's own business, as ever."""
        return torch.cuda.current_stream(self._device) == self._home

    def _entered(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        # A new thread is on device 0; leaving the context there would cost a context, half a gigabyte, on that one.
        torch.cuda.set_device(self._device)
        return torch.cuda.stream(stream)


def streams(device: torch.device, count: int) -> HostStreams:
    """The streams of a model on ``device`` with ``count`` tasks."""
    return CudaStreams(device, count) if device.type == "cuda" else HostStreams()


def coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether one all-reduce of ``group`` can take several tensors on ``device``: not gloo's on a GPU."""
    return device.type == "cpu" or enqueues(group, device)


def enqueues(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether waiting for a collective of ``group`` blocks streams and not the host, as with NCCL.

    `dist.get_backend` does not tell: it says "undefined" for ``init_process_group()``, or "cpu:gloo,cuda:nccl".
    """
    return device.type == "cuda" and group._get_backend(device).name() == "nccl"
