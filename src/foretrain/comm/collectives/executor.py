"""Executor of collectives: issues chunks in the order that all ranks have agreed on.

One thread issues, one completes. A collective that was issued cannot be recalled, so credit returns when it has
*completed*. Subclasses hand chunks to a communication library: `foretrain.plugins.torch.process_group_executor` to
torch.distributed, `HostExecutor` to collectives on plain buffers.
"""

from __future__ import annotations

import hashlib
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from foretrain.comm.bounded import Hint
from foretrain.comm.bounded.ledger import Ledger
from foretrain.comm.buffers import BufferSlice, HostGradients
from foretrain.comm.control_plane import ControlPlane
from foretrain.comm.coordinator.protocol import CollectiveCommand, pack
from foretrain.comm.event_loop import FAILURE_GRACE, POLL_INTERVAL
from foretrain.comm.ps.placement import Dtype
from foretrain.comm.run_trace import CommRecord
from foretrain.errors import PeerLost, ScheduleError
from foretrain.tasks import Chunk, Op, Piece, Task


class DeviceMark(Protocol):
    """Event on a device."""

    def synchronize(self) -> None:
        """Block the host until the device has reached it."""


WorkT = TypeVar("WorkT")


class Sent(NamedTuple, Generic[WorkT]):
    """Command in flight: its operations, its callback, when it was issued, and the event behind it, if any."""

    command: CollectiveCommand
    work: WorkT
    done: Callable[[CollectiveCommand], None]
    issued: int
    mark: DeviceMark | None


class CollectiveExecutor(ABC, Generic[WorkT]):
    """Issuer of commands, with a thread that completes them.

    Args:
        tasks: indexed by task.
        landed: called with a task, when all its bytes are summed, and whether any rank had a gradient.
        failed: called once with the error of a collective.
        enqueues: whether operations complete on a device, behind which readers are enqueued, and not on the host: then
            a chunk lands as soon as it is issued.
        keep: whether to keep a `CommRecord` of every chunk.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        landed: Callable[[int, bool], None],
        failed: Callable[[BaseException], None],
        *,
        enqueues: bool = False,
        keep: bool = False,
    ) -> None:
        self._tasks, self._landed, self._failed, self._enqueues = tasks, landed, failed, enqueues
        self._missing = [task.size for task in tasks]
        self._digest = hashlib.blake2b(digest_size=16)
        self._in_flight: deque[CollectiveCommand] = deque()
        self._queue: SimpleQueue[Sent[WorkT] | None] = SimpleQueue()
        self._closing = threading.Event()
        self.sequence = 0
        self.records: list[CommRecord] = []
        self._keep = keep
        self._thread = threading.Thread(target=self._complete_all, name="foretrain-completer", daemon=True)
        self._thread.start()

    def start(self, command: CollectiveCommand, done: Callable[[CollectiveCommand], None]) -> None:
        """Issue ``command``; ``done(command)`` runs on the completing thread. Only one thread may call this."""
        if command.sequence != self.sequence:
            raise ScheduleError(f"command {command.sequence} came where {self.sequence} was due")
        self.sequence += 1
        operation, pieces = command.packed or pack(command)
        self._digest.update(operation.to_bytes() + pieces)
        self._in_flight.append(command)
        issued = time.perf_counter_ns()
        work, mark = self._issue(command), None
        if self._enqueues:
            mark = self._arrive(command, work)
            self._land(command)
        self._queue.put(Sent(command, work, done, issued, mark))

    @property
    def digest(self) -> bytes:
        """Return a hash of all commands issued so far, equal on all ranks."""
        return self._digest.digest()

    def last(self) -> str:
        """Return a description of the oldest command in flight, or the last sequence number, for messages."""
        if self._in_flight:
            command = self._in_flight[0]
            return f"sequence {command.sequence} ({describe(command.chunk, self._tasks)}) is under way"
        return f"last sequence {self.sequence - 1}"

    def close(self) -> None:
        """Stop the thread without waiting for collectives in flight."""
        self._closing.set()
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(3 * POLL_INTERVAL)

    @abstractmethod
    def _issue(self, command: CollectiveCommand) -> WorkT:
        """Begin the operations of ``command``."""

    @abstractmethod
    def _arrive(self, command: CollectiveCommand, work: WorkT) -> DeviceMark | None:
        """Wait for the operations, on the device or on the host, and unpack their results; return the event behind."""

    def _complete_all(self) -> None:
        try:
            while (sent := self._queue.get()) is not None:
                self._complete(sent)
        except BaseException as error:
            # A rank that ends breaks its collectives and its link, and the link tells which rank it was.
            if not self._closing.wait(FAILURE_GRACE):
                text = str(error) if isinstance(error, PeerLost) else f"a collective failed: {error}"
                self._failed(PeerLost(f"{text}; {self.last()}"))

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise PeerLost("this rank closes its attachment")

    def _complete(self, sent: Sent[WorkT]) -> None:
        if not self._enqueues:
            self._arrive(sent.command, sent.work)
        elif sent.mark is not None:
            sent.mark.synchronize()
        if self._keep:
            self.records.append(CommRecord(sent.command.chunk, sent.issued, time.perf_counter_ns()))
        self._in_flight.popleft()
        sent.done(sent.command)
        if not self._enqueues:
            self._land(sent.command)

    def _land(self, command: CollectiveCommand) -> None:
        if command.chunk.op == "reduce_scatter":
            return
        for piece in command.chunk.pieces:
            self._missing[piece.task] -= piece.size
            if not self._missing[piece.task]:
                self._missing[piece.task] = self._tasks[piece.task].size
                self._landed(piece.task, piece.task not in command.unused)


class Work(Protocol):
    """One operation, which is under way or done."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the operation is done; return False if ``timeout`` seconds have passed before.

        Raises:
            LinkError: it failed; ``peer`` is the rank that was lost, None where these collectives were closed.
        """
        ...


class Collectives(Protocol):
    """Operations between all ranks, which all issue them in the same order; they complete in that order.

    ``values`` is a contiguous, writable, one-dimensional array of float32, float64, float16, int32, int64 or uint8, or
    of uint16 where ``bfloat16`` says that these are its bits. It belongs to the operation until that is done, but
    operations in flight may share it. Sums of 16-bit floats are computed in single precision and rounded once per hop.
    All ranks get the same bits, but a NaN's payload may differ. A ``hint`` is for those that may lose some.

    Attributes:
        rank: of this process.
        ranks: number of all.
    """

    @property
    def rank(self) -> int: ...  # noqa: D102

    @property
    def ranks(self) -> int: ...  # noqa: D102

    def all_reduce(self, values: NDArray[Any], *, bfloat16: bool = False, hint: Hint | None = None) -> Work:
        """Replace ``values`` by their sum over all ranks."""
        ...

    def reduce_scatter(self, values: NDArray[Any], *, bfloat16: bool = False, hint: Hint | None = None) -> Work:
        """Replace block ``rank`` of ``values`` by its sum over all ranks; the other blocks are undefined afterwards.

        The length is divisible by the number of ranks.
        """
        ...

    def all_gather(self, values: NDArray[Any], *, bfloat16: bool = False, hint: Hint | None = None) -> Work:
        """Replace each block r of ``values`` by that of rank r; the length is divisible by the number of ranks."""
        ...

    def close(self) -> None:
        """End the thread and the sockets; operations under way fail. From any thread, any number of times."""
        ...


class HostExecutor(CollectiveExecutor[list[tuple[Work, Callable[[], None]]]]):
    """Executor of collectives on NumPy buffers.

    Args:
        gradients: the flat buffers.
        collectives: for these collectives alone.
        tasks, landed, failed, keep: as of `CollectiveExecutor`.
        ledger: of a transport that may lose some.
    """

    def __init__(
        self,
        gradients: HostGradients,
        collectives: Collectives,
        tasks: Sequence[Task],
        landed: Callable[[int, bool], None],
        failed: Callable[[BaseException], None],
        keep: bool = False,
        ledger: Ledger | None = None,
    ) -> None:
        self._gradients, self._collectives, self._ledger = gradients, collectives, ledger
        self._scattered: dict[tuple[Piece, ...], list[tuple[NDArray[Any], list[BufferSlice], Dtype]]] = {}
        super().__init__(tasks, landed, failed, keep=keep)

    def _issue(self, command: CollectiveCommand) -> list[tuple[Work, Callable[[], None]]]:
        chunk = command.chunk
        if chunk.op == "all_gather":
            # Operations complete in order, so that what was scattered need not be awaited.
            return [self._all_gather(*scattered) for scattered in self._scattered.pop(chunk.pieces)]
        whole = chunk.op == "reduce_scatter"  # `all_gather` must find unused tasks as well
        pieces = [piece for piece in chunk.pieces if whole or piece.task not in command.unused]
        found = groupby(self._gradients.runs(pieces), lambda run: run.buffer)
        parts = [(list(runs), self._gradients.kinds[each]) for each, runs in found]
        if not whole:
            return [self._all_reduce(runs, dtype) for runs, dtype in parts]
        self._scattered[chunk.pieces] = []
        return [self._reduce_scatter(chunk, runs, dtype) for runs, dtype in parts]

    def _all_reduce(self, runs: list[BufferSlice], dtype: Dtype) -> tuple[Work, Callable[[], None]]:
        slices, hint = self._slices(runs), self._hint("all_reduce", runs)
        values = slices[0] if len(slices) == 1 else np.concatenate(slices)
        work = self._collectives.all_reduce(values, bfloat16=dtype == "bfloat16", hint=hint)
        unpack = _nothing if values is slices[0] else partial(_unpack, values, slices)
        return work, self._noting(runs, work, unpack)

    def _reduce_scatter(self, chunk: Chunk, runs: list[BufferSlice], dtype: Dtype) -> tuple[Work, Callable[[], None]]:
        slices, hint = self._slices(runs), self._hint("reduce_scatter", runs)
        values = np.pad(np.concatenate(slices), (0, -sum(map(len, slices)) % self._collectives.ranks))
        self._scattered[chunk.pieces].append((values, runs, dtype))
        work = self._collectives.reduce_scatter(values, bfloat16=dtype == "bfloat16", hint=hint)
        return work, self._noting(runs, work, _nothing)

    def _all_gather(
        self, values: NDArray[Any], runs: list[BufferSlice], dtype: Dtype
    ) -> tuple[Work, Callable[[], None]]:
        hint = self._hint("all_gather", runs)
        work = self._collectives.all_gather(values, bfloat16=dtype == "bfloat16", hint=hint)
        return work, partial(_unpack, values, self._slices(runs))

    def _slices(self, runs: list[BufferSlice]) -> list[NDArray[Any]]:
        return [self._gradients.slice(run) for run in runs]

    def _hint(self, operation: Op, runs: list[BufferSlice]) -> Hint | None:
        return self._ledger.hint(operation, runs) if self._ledger is not None else None

    def _noting(self, runs: list[BufferSlice], work: Work, unpack: Callable[[], None]) -> Callable[[], None]:
        """Return ``unpack``, which then also books what was lost."""
        if self._ledger is None:
            return unpack
        ledger = self._ledger

        def unpack_and_note() -> None:
            unpack()
            ledger.note(runs, work)

        return unpack_and_note

    def _arrive(self, command: CollectiveCommand, work: list[tuple[Work, Callable[[], None]]]) -> None:
        for each, unpack in work:
            while not each.wait(POLL_INTERVAL):
                self._check_open()
            unpack()


def _nothing() -> None:
    """Do nothing: the result is in its place."""


def _unpack(payload: NDArray[Any], targets: Sequence[NDArray[Any]]) -> None:
    """Copy ``payload`` to ``targets``, one after the other; padding behind them is left out."""
    start = 0
    for target in targets:
        target[:] = payload[start : start + len(target)]
        start += len(target)


def series(control: ControlPlane, collectives: Collectives, size: int, count: int, depth: int) -> float:
    """Return the ns per all-reduce of ``size`` bytes in a series of ``count`` with ``depth`` in flight. Collective."""
    buffers = [np.zeros(size // 4, np.float32) for _ in range(depth)]
    control.all_true(True)
    began, works = time.perf_counter_ns(), deque[Work]()
    for k in range(count):
        if len(works) == depth:
            works.popleft().wait()
        works.append(collectives.all_reduce(buffers[k % depth]))
    for work in works:
        work.wait()
    return (time.perf_counter_ns() - began) / count


def describe(chunk: Chunk, tasks: Sequence[Task]) -> str:
    """Return a description of ``chunk`` for messages: operation, first task, how many more, bytes."""
    first, *others = chunk.pieces
    more = f" +{len(others)}" if others else ""
    return f"{chunk.op} of task {tasks[first.task].name!r}{more}, {chunk.size} bytes"
