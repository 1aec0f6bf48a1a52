"""Whose turn it is on the device: on a GPU every hand-over between threads is an event between streams as well.

    compute stream ── ready(task) ──▶ issue stream ── collective ──▶ update stream ── updated(task) ──▶ compute stream

No host waits for the device here. On a CPU, where what a call returns is done, all of this is nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch


class HostStreams:
    """A CPU: nothing to hand over."""

    def ready(self, task: int) -> None:
        """The gradient of ``task`` is in its buffer."""

    def issuing(self, tasks: Iterable[int]) -> AbstractContextManager[object]:
        """Inside, collectives see the gradients of ``tasks``."""
        return nullcontext()

    def updating(self) -> AbstractContextManager[object]:
        """Inside, work follows what arrived."""
        return nullcontext()

    def arrived(self) -> torch.cuda.Event | None:
        """A mark behind what was put into the update stream so far; None where that is already done."""
        return None

    def updated(self, tasks: Iterable[int]) -> None:
        """The parameters of ``tasks`` have been given their updates, inside `updating`."""

    def acquire(self, tasks: Iterable[int]) -> None:
        """The caller's stream may use the parameters of ``tasks`` from here on."""

    def acquire_all(self) -> None:
        """The caller's stream may use all gradients and parameters from here on."""


class CudaStreams(HostStreams):
    """One GPU: an issue stream and an update stream beside the streams of the model.

    Args:
        device: where the model is.
        count: tasks.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._device = device
        self._issue = torch.cuda.Stream(device, priority=-1)
        self._update = torch.cuda.Stream(device)
        self._ready = [torch.cuda.Event() for _ in range(count)]
        self._updated: list[torch.cuda.Event | None] = [None] * count

    def ready(self, task: int) -> None:
        """Marks the autograd engine's stream, on which gradient hooks run."""
        self._ready[task].record(torch.cuda.current_stream(self._device))

    def issuing(self, tasks: Iterable[int]) -> AbstractContextManager[object]:
        """The issue stream, behind the backward pass of ``tasks``."""
        for task in tasks:
            self._issue.wait_event(self._ready[task])
        return torch.cuda.stream(self._issue)

    def updating(self) -> AbstractContextManager[object]:
        """The update stream."""
        return torch.cuda.stream(self._update)

    def arrived(self) -> torch.cuda.Event | None:
        """An event to wait for where completion must be known, which is only where credit returns."""
        event = torch.cuda.Event(blocking=True)
        event.record(self._update)
        return event

    def updated(self, tasks: Iterable[int]) -> None:
        """One event serves the whole batch."""
        event = torch.cuda.Event()
        event.record(self._update)
        for task in tasks:
            self._updated[task] = event

    def acquire(self, tasks: Iterable[int]) -> None:
        """Makes the current stream wait, not the host."""
        stream = torch.cuda.current_stream(self._device)
        for event in {self._updated[task] for task in tasks} - {None}:
            stream.wait_event(event)  # pyright: ignore[reportArgumentType]

    def acquire_all(self) -> None:
        """Makes the current stream wait for the whole update stream."""
        torch.cuda.current_stream(self._device).wait_stream(self._update)


def streams(device: torch.device, count: int) -> HostStreams:
    """The streams of a model on ``device`` with ``count`` tasks."""
    return CudaStreams(device, count) if device.type == "cuda" else HostStreams()
