"""Order of work on the device, and waiting for collectives with a check for failures.

On a GPU every hand-over between threads is an event between streams, too:

    compute ── ready(task) ──▶ issue ── collective ──▶ arrival ── landed(tasks) ──▶ update ── updated(tasks) ──▶ compute
    compute ── step_mark(), in step() ───────────────────────────────────────────▶ update

The host never waits for the device here. On a CPU nothing is to be done: when a call returns, its work is complete.

# Note [Arrivals do not wait for updates]
An update must come after everything that was enqueued before step(), or it would write into parameters that are still
read: by the end of the backward pass, or by a script that logs their norms. Credit must not wait for that, because the
host is far ahead of the device and communication would stop until the backward pass is over. So waiting for collectives
and returning credit has a stream of its own.

# Note [Waiting with a check]
gloo gives up on a stopped rank only after half an hour, so a waiting thread checks for failures meanwhile. With NCCL
only the device waits, and its kernels spin for ever when a peer is gone: they must be aborted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from foretrain.comm.event_loop import FAILURE_GRACE, POLL_INTERVAL
from foretrain.errors import PeerLost

logger = logging.getLogger("foretrain")
_INTERVAL = timedelta(seconds=POLL_INTERVAL)


class HostStreams:
    """Hand-overs on a CPU, which need no work.

    Attributes:
        enqueues: whether calls return when work is enqueued, so that each stream must `acquire` what it uses.
    """

    enqueues = False

    def ready(self, task: int) -> None:
        """Mark that the gradient of ``task`` is in its buffer."""

    def issuing(self, tasks: Iterable[int]) -> AbstractContextManager[object]:
        """Return a context whose collectives see the gradients of ``tasks``. For threads of the runtime."""
        return nullcontext()

    def arriving(self) -> AbstractContextManager[object]:
        """Return a context for waiting for collectives and unpacking results. For threads of the runtime."""
        return nullcontext()

    def arrived(self) -> torch.cuda.Event | None:
        """Return an event behind all that has arrived; None on a CPU."""
        return None

    def landed(self, tasks: Iterable[int], mark: torch.cuda.Event | None) -> None:
        """Record that the sums of ``tasks`` are complete at ``mark``, of `arrived`."""

    def step_mark(self, settings: Iterable[torch.Tensor]) -> torch.cuda.Event | None:
        """Return an event behind all that was enqueued before step(); the update reads ``settings``."""
        return None

    def updating(self, tasks: Sequence[int], step_mark: torch.cuda.Event | None) -> AbstractContextManager[object]:
        """Return a context whose work follows ``step_mark`` and the sums of ``tasks``. For threads of the runtime."""
        return nullcontext()

    def updated(self, tasks: Iterable[int]) -> None:
        """Record that the updates of ``tasks`` were issued, inside `updating`."""

    def acquire(self, tasks: Iterable[int]) -> None:
        """Let the caller's stream use the sums and parameters of ``tasks`` from here on."""

    def acquire_all(self) -> None:
        """Let the caller's stream use all gradients and parameters from here on."""

    def on_step_stream(self) -> bool:
        """Return whether the caller's stream is that of the last step(), which other streams follow."""
        return True


class CudaStreams(HostStreams):
    """Streams of one GPU for issuing, arrivals and updates beside the streams of the model.

    Args:
        device: of the model.
        count: number of tasks.
    """

    enqueues = True

    def __init__(self, device: torch.device, count: int) -> None:
        self._device = device
        self._issue = torch.cuda.Stream(device, priority=-1)
        self._arrival = torch.cuda.Stream(device, priority=-1)
        self._update = torch.cuda.Stream(device)
        self._step_stream = torch.cuda.current_stream(device)
        self._ready = [torch.cuda.Event() for _ in range(count)]
        self._marks: list[torch.cuda.Event | None] = [None] * count
        """Event behind the last write to each task's sum or parameter."""

    def ready(self, task: int) -> None:
        """Mark the autograd engine's stream, on which gradient hooks run."""
        self._ready[task].record(torch.cuda.current_stream(self._device))

    def issuing(self, tasks: Iterable[int]) -> AbstractContextManager[object]:
        """Enter the issue stream, behind the backward pass of ``tasks``."""
        for task in tasks:
            self._issue.wait_event(self._ready[task])
        return self._entered(self._issue)

    def arriving(self) -> AbstractContextManager[object]:
        """Enter the arrival stream."""
        return self._entered(self._arrival)

    def arrived(self) -> torch.cuda.Event | None:
        """Return an event for which the host waits only to return credit."""
        event = torch.cuda.Event(blocking=True)
        event.record(self._arrival)
        return event

    def landed(self, tasks: Iterable[int], mark: torch.cuda.Event | None) -> None:
        """Keep one event for the whole chunk; the last piece of a task decides."""
        for task in tasks:
            self._marks[task] = mark

    def step_mark(self, settings: Iterable[torch.Tensor]) -> torch.cuda.Event | None:
        """Mark the current stream, and keep the memory of ``settings`` until the update stream has read them."""
        self._step_stream = torch.cuda.current_stream(self._device)
        for value in settings:
            if value.is_cuda:
                value.record_stream(self._update)
        event = torch.cuda.Event()
        event.record(self._step_stream)
        return event

    def updating(self, tasks: Sequence[int], step_mark: torch.cuda.Event | None) -> AbstractContextManager[object]:
        """Enter the update stream, behind both."""
        for event in {self._marks[task] for task in tasks} | {step_mark}:
            if event is not None:
                self._update.wait_event(event)
        return self._entered(self._update)

    def updated(self, tasks: Iterable[int]) -> None:
        """Keep one event for the whole batch."""
        event = torch.cuda.Event()
        event.record(self._update)
        for task in tasks:
            self._marks[task] = event

    def acquire(self, tasks: Iterable[int]) -> None:
        """Make the current stream wait, not the host."""
        stream = torch.cuda.current_stream(self._device)
        for event in {self._marks[task] for task in tasks}:
            if event is not None:
                stream.wait_event(event)

    def acquire_all(self) -> None:
        """Make the current stream wait for all arrivals and updates."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_stream(self._arrival)
        stream.wait_stream(self._update)

    def on_step_stream(self) -> bool:
        """Compare with the stream of the last `step_mark`."""
        return torch.cuda.current_stream(self._device) == self._step_stream

    def _entered(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        # A new thread is on device 0; using it there would create a context of half a gigabyte on that device.
        torch.cuda.set_device(self._device)
        return torch.cuda.stream(stream)


def streams(device: torch.device, count: int) -> HostStreams:
    """Return the streams of a model on ``device`` with ``count`` tasks."""
    return CudaStreams(device, count) if device.type == "cuda" else HostStreams()


def coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether one all-reduce of ``group`` can take several tensors on ``device``: not gloo's on a GPU."""
    return device.type == "cpu" or enqueues(group, device)


def enqueues(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether waiting for a collective of ``group`` blocks streams and not the host, as with NCCL.

    `dist.get_backend` does not tell: it says "undefined" for ``init_process_group()``, or "cpu:gloo,cuda:nccl".
    """
    return device.type == "cuda" and group._get_backend(device).name() == "nccl"


def finish(work: dist.Work | None, check: Callable[[], None], *, enqueues: bool, grace: float = FAILURE_GRACE) -> None:
    """Wait for ``work``, and call ``check`` every `POLL_INTERVAL`.

    Args:
        work: of an asynchronous collective.
        check: raises the error that has ended the job, if any.
        enqueues: whether the stream waits, as with NCCL: then ``work.wait()`` returns at once; with a timeout it would
            block, and abort the communicator at the end.
        grace: seconds after a failure in which ``check`` may still raise a better explanation.

    Raises:
        PeerLost: the collective failed, and ``check`` raised nothing.
    """
    if work is None:
        return
    if enqueues:
        work.wait()
        return
    while _error(work, _INTERVAL) is not None:
        check()
        if work.is_completed() and (problem := _error(work)) is not None:
            deadline = time.monotonic() + grace
            while time.monotonic() < deadline:
                time.sleep(0.05)
                check()
            raise PeerLost(f"a collective failed: {problem}")


def abort(device: torch.device, *groups: dist.ProcessGroup) -> None:
    """Abort the collectives that NCCL's ``groups`` have enqueued on ``device``. Returns at once; gloo's go on.

    Streams and the threads that wait for them go on; the results of the collectives are undefined. Each group is
    aborted by a thread of its own, without waiting: its kernel may be queued behind another group's, or NCCL be stuck.
    """
    for group in groups:
        if enqueues(group, device):
            threading.Thread(target=_abort, args=(device, group), name="foretrain-abort", daemon=True).start()


def _abort(device: torch.device, group: dist.ProcessGroup) -> None:
    try:
        group._get_backend(device).abort()
    except RuntimeError as error:
        logger.debug("a communicator could not be aborted: %s", error)


def _error(work: dist.Work, *timeout: timedelta) -> str | None:
    """Return the error of waiting for ``work``, such as that ``timeout`` has passed; None if it succeeded."""
    try:
        work.wait(*timeout)
    except RuntimeError as error:
        return str(error)
    return None
