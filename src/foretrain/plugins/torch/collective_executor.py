"""Executor of collectives: issues chunks through torch.distributed in the order that all ranks have agreed on.

One thread issues, one completes. A collective that was issued cannot be recalled, so credit returns when it has
*completed*, while on a GPU the model may go on as soon as everything it needs is *enqueued*: see Note [Two arrivals].
"""

from __future__ import annotations

import hashlib
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceCoalescedOptions, AllreduceOptions

from foretrain.comm.coordinator.protocol import CollectiveCommand
from foretrain.comm.event_loop import FAILURE_GRACE
from foretrain.comm.run_trace import CommRecord
from foretrain.errors import PeerLost, ScheduleError
from foretrain.plugins.torch.gradient_buffer import BufferSlice, GradientBuffer, Rounding
from foretrain.plugins.torch.streams import HostStreams, coalesces, enqueues
from foretrain.plugins.torch.work_wait import POLL_INTERVAL, finish
from foretrain.tasks import Chunk, Piece, Task

# Note [Two arrivals]
# On a CPU backend (gloo) a work's wait() returns when the sum is there: a chunk lands when it is complete, on the
# completing thread. NCCL's wait() only makes the current stream wait, so there a chunk *lands* right after it is
# issued: its readers are enqueued behind it, through the arrival stream. Its credit still returns when an event behind
# it has been reached, for which the completing thread blocks: the host is far ahead of the device, and polling would
# take the interpreter from the model. `work_wait.abort` ends such a wait.

# Note [Slices that are no neighbours]
# A chunk that fuses a small gradient with the rest of a larger one is two slices of the flat buffer. Copying them
# together, and the sum apart, cost 0.6 ms per megabyte on the threads that decide; gloo's coalesced all-reduce copies
# as much on threads of its own, 0.1 ms, and NCCL's does not copy at all. The sums are the same bits. gloo has no
# coalesced all-reduce on a GPU, so there slices are still copied.

_Work: TypeAlias = tuple[dist.Work, Callable[[], None] | None]
"""Collective, and what unpacks its result if that was not reduced in place."""


class Sent(NamedTuple):
    """Command in flight: its collectives, its callback, when it was issued, and the event behind it."""

    command: CollectiveCommand
    works: list[_Work]
    done: Callable[[CollectiveCommand], None]
    issued: int
    event: torch.cuda.Event | None


class CollectiveExecutor:
    """Issuer of commands, with a thread that completes them.

    Args:
        gradients: the flat buffers.
        tasks: indexed by task.
        group: a process group for these collectives alone.
        streams: of the model's device.
        rounding: compression, if any.
        landed: called with a task, when all its bytes are summed, and whether any rank had a gradient.
        failed: called once with the error of a collective.
        keep: whether to keep a `CommRecord` of every chunk.
    """

    def __init__(
        self,
        gradients: GradientBuffer,
        tasks: Sequence[Task],
        group: dist.ProcessGroup,
        streams: HostStreams,
        rounding: Rounding | None,
        landed: Callable[[int, bool], None],
        failed: Callable[[BaseException], None],
        keep: bool = False,
    ) -> None:
        self._gradients, self._tasks, self._group = gradients, tasks, group
        self._streams, self._rounding = streams, rounding
        self._landed, self._failed = landed, failed
        self._missing = [task.size for task in tasks]
        self._shards: dict[tuple[Piece, ...], list[tuple[dist.Work, list[BufferSlice], torch.Tensor]]] = {}
        self._digest = hashlib.blake2b(digest_size=16)
        self._in_flight: deque[CollectiveCommand] = deque()
        self._queue: SimpleQueue[Sent | None] = SimpleQueue()
        self._enqueues = enqueues(group, gradients.flat[0].device)
        self._coalesces = coalesces(group, gradients.flat[0].device)
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
        chunk = command.chunk
        self._digest.update(signature(command))
        self._in_flight.append(command)
        issued = time.perf_counter_ns()
        # A reduce-scatter sends unused tasks as well; see `_scatter`.
        whole = chunk.op != "all_reduce"
        used = [piece.task for piece in chunk.pieces if whole or piece.task not in command.unused]
        with torch.no_grad(), self._streams.issuing(used):
            works = self._issue(command)
        event = None
        if self._enqueues:
            event = self._arrive(command, works)
            self._land(command)
        self._queue.put(Sent(command, works, done, issued, event))

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

    def _issue(self, command: CollectiveCommand) -> list[_Work]:
        chunk = command.chunk
        if chunk.op == "reduce_scatter":
            return self._scatter(chunk)
        if chunk.op == "all_gather":
            return self._gather(chunk)
        pieces = [piece for piece in chunk.pieces if piece.task not in command.unused]
        return [self._reduce(places) for places in self._by_buffer(pieces)]

    def _reduce(self, places: list[BufferSlice]) -> _Work:
        """All-reduce ``places`` of one buffer as one operation; see Note [Slices that are no neighbours]."""
        values = self._values(places)
        sent = self._rounded(places, values)
        if len(sent) > 1 and not self._coalesces:
            together = torch.cat(sent)
            return self._all_reduce([together]), lambda: _unpack(together, values)
        return self._all_reduce(sent), None if sent is values else lambda: _copy(sent, values)

    def _all_reduce(self, tensors: list[torch.Tensor]) -> dist.Work:
        # The group's own methods: those of torch.distributed look the group up and log, 30 µs for each operation.
        if len(tensors) == 1:
            return self._group.allreduce(tensors, AllreduceOptions())
        return self._group.allreduce_coalesced(tensors, AllreduceCoalescedOptions())

    def _values(self, places: list[BufferSlice]) -> list[torch.Tensor]:
        return [self._gradients.slice(place) for place in places]

    def _rounded(self, places: list[BufferSlice], values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return compressed ``values``, the elements of ``places``; themselves without compression."""
        if self._rounding is None:
            return values
        return [self._rounding.round(place, each) for place, each in zip(places, values, strict=True)]

    def _scatter(self, chunk: Chunk) -> list[_Work]:
        """Reduce-scatter each buffer's part; every rank keeps one Nth of the sum until it is gathered."""
        count = dist.get_world_size(self._group)
        works, shards = [], []
        for places in self._by_buffer(chunk.pieces):
            payload = torch.cat(self._rounded(places, self._values(places)))
            padded = torch.nn.functional.pad(payload, (0, -len(payload) % count))
            shard = padded.new_empty(len(padded) // count)
            work = dist.reduce_scatter_single(shard, padded, group=self._group, async_op=True)
            assert work is not None
            # The input must live until the operation is done: the closure keeps it.
            works.append((work, lambda padded=padded: None))
            shards.append((work, places, shard))
        self._shards[chunk.pieces] = shards
        return works

    def _gather(self, chunk: Chunk) -> list[_Work]:
        if chunk.pieces not in self._shards:
            raise ScheduleError("an all-gather must name the pieces of one reduce-scatter before it, in its order")
        works = []
        for scattered, places, shard in self._shards.pop(chunk.pieces):
            # It may be complete on the coordinator and not here.
            scattered.wait()
            whole, values = shard.new_empty(len(shard) * dist.get_world_size(self._group)), self._values(places)
            work = dist.all_gather_single(whole, shard, group=self._group, async_op=True)
            # The input must live until the operation is done: the closure keeps it.
            works.append((work, lambda whole=whole, values=values, shard=shard: _unpack(whole, values)))
        return works

    def _by_buffer(self, pieces: Sequence[Piece]) -> list[list[BufferSlice]]:
        return [list(places) for _, places in groupby(self._gradients.runs(pieces), lambda place: place.buffer)]

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

    def _complete(self, sent: Sent) -> None:
        if self._enqueues:
            if sent.event is not None:
                sent.event.synchronize()
        else:
            self._arrive(sent.command, sent.works)
        if self._keep:
            self.records.append(CommRecord(sent.command.chunk, sent.issued, time.perf_counter_ns()))
        self._in_flight.popleft()
        sent.done(sent.command)
        if not self._enqueues:
            self._land(sent.command)

    def _arrive(self, command: CollectiveCommand, works: list[_Work]) -> torch.cuda.Event | None:
        """Wait for collectives, on the stream or on the host, and unpack their results."""
        with torch.no_grad(), self._streams.arriving():
            for work, unpack in works:
                finish(work, self._check_open, enqueues=self._enqueues, grace=0)
                if unpack:
                    unpack()
            mark = self._streams.arrived()
        self._streams.landed((piece.task for piece in command.chunk.pieces), mark)
        return mark

    def _land(self, command: CollectiveCommand) -> None:
        if command.chunk.op == "reduce_scatter":
            return
        for piece in command.chunk.pieces:
            self._missing[piece.task] -= piece.size
            if not self._missing[piece.task]:
                self._missing[piece.task] = self._tasks[piece.task].size
                self._landed(piece.task, piece.task not in command.unused)


def signature(command: CollectiveCommand) -> bytes:
    """Return what all ranks must have in common of ``command``, for a hash; tasks by number."""
    numbers = [
        n
        for piece in command.chunk.pieces
        for n in (piece.task, piece.offset, piece.size, piece.task in command.unused)
    ]
    return command.chunk.op.encode() + struct.pack(f"<{len(numbers)}q", *numbers)


def describe(chunk: Chunk, tasks: Sequence[Task]) -> str:
    """Return a description of ``chunk`` for messages: operation, first task, how many more, bytes."""
    first, *others = chunk.pieces
    more = f" +{len(others)}" if others else ""
    return f"{chunk.op} of task {tasks[first.task].name!r}{more}, {chunk.size} bytes"


def _unpack(payload: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Copy ``payload`` to ``targets``, one after the other; padding behind them is left out."""
    sizes = [len(target) for target in targets]
    _copy(payload[: sum(sizes)].split(sizes), targets)


def _copy(values: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for value, target in zip(values, targets, strict=True):
        target.copy_(value)
