"""The carrier: puts chunks through torch.distributed in the one order that all ranks have agreed on.

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
from queue import SimpleQueue
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceCoalescedOptions, AllreduceOptions

from foretrain.comm.coordinator.protocol import CollectiveCommand
from foretrain.comm.run_trace import CommRecord
from foretrain.comm.event_loop import FAILURE_GRACE
from foretrain.errors import PeerLost, ScheduleError
from foretrain.plugins.torch.gradient_buffer import BufferSlice, GradientBuffer, Rounding
from foretrain.plugins.torch.streams import HostStreams, coalesces, enqueues
from foretrain.plugins.torch.work_wait import LOOK, finish
from foretrain.tasks import Chunk, Piece, Task

# Note [Two arrivals]
# On a CPU backend (gloo) a work's wait() returns when the sum is there: landing and completion are one moment, in the
# completing thread. NCCL's wait() only makes the current stream wait, so there a chunk *lands* right after it is
# issued: whatever uses it is enqueued behind it, through the arrival stream. Its credit still returns when an event
# behind it has been reached, for which the completing thread waits. It blocks for that: the host is far ahead of the
# device, and looking again and again would take the interpreter from the model. `waiting.abort` ends such a wait.

# Note [Slices that are no neighbours]
# A chunk that fuses a small gradient with the rest of a larger one is two slices of the flat buffer. Copying them
# together, and the sum apart, cost 0.6 ms per megabyte on the threads that decide; gloo's coalesced all-reduce copies
# as much on threads of its own, 0.1 ms, and NCCL's does not copy at all. The sums are the same bits. gloo has none on a
# GPU: there it is still copies.


class Sent(NamedTuple):
    """An order under way: its works, and where each result goes if it was not reduced in place."""

    order: CollectiveCommand
    works: list[tuple[dist.Work, Callable[[], None] | None]]
    done: Callable[[CollectiveCommand], None]
    issued: int
    event: torch.cuda.Event | None


class CollectiveExecutor:
    """Issues orders and says when tasks have landed. It owns one thread.

    Args:
        gradients: the buffers.
        tasks: indexed by task; names for messages, sizes for landing.
        group: a process group that nobody else uses.
        streams: of the model's device.
        rounding: compression, if any.
        landed: called with a task and whether any rank used it when all its bytes are summed.
        failed: called once with what a collective raised.
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
        self._left = [task.size for task in tasks]
        self._shards: dict[tuple[Piece, ...], list[tuple[dist.Work, list[BufferSlice], torch.Tensor]]] = {}
        self._digest = hashlib.blake2b(digest_size=16)
        self._under_way: deque[CollectiveCommand] = deque()
        self._queue: SimpleQueue[Sent | None] = SimpleQueue()
        self._enqueues = enqueues(group, gradients.flat[0].device)
        self._coalesces = coalesces(group, gradients.flat[0].device)
        self._closing = threading.Event()
        self.sequence = 0
        self.records: list[CommRecord] = []
        self._keep = keep
        self._thread = threading.Thread(target=self._complete_all, name="foretrain-completer", daemon=True)
        self._thread.start()

    def start(self, order: CollectiveCommand, done: Callable[[CollectiveCommand], None]) -> None:
        """Issues ``order``; ``done(order)`` runs on the completing thread. Only one thread may call this."""
        if order.sequence != self.sequence:
            raise ScheduleError(f"order {order.sequence} came where {self.sequence} was due")
        self.sequence += 1
        chunk = order.chunk
        self._digest.update(spelled(order))
        self._under_way.append(order)
        issued = time.perf_counter_ns()
        # A reduce-scatter sends what nobody uses as well; see `_scatter`.
        whole = chunk.op != "all_reduce"
        used = [piece.task for piece in chunk.pieces if whole or piece.task not in order.unused]
        with torch.no_grad(), self._streams.issuing(used):
            works = self._issue(order)
        event = None
        if self._enqueues:
            event = self._arrive(order, works)
            self._land(order)
        self._queue.put(Sent(order, works, done, issued, event))

    @property
    def digest(self) -> bytes:
        """A hash of all orders issued so far: names and bytes, and which of these are sent. Equal on all ranks."""
        return self._digest.digest()

    def last(self) -> str:
        """The oldest order that is not complete, or the last sequence number, for messages."""
        if self._under_way:
            order = self._under_way[0]
            return f"sequence {order.sequence} ({describe(order.chunk, self._tasks)}) is under way"
        return f"last sequence {self.sequence - 1}"

    def close(self) -> None:
        """Ends the thread. What is under way is waited for only if it is already complete."""
        self._closing.set()
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(3 * LOOK)

    def _issue(self, order: CollectiveCommand) -> list[tuple[dist.Work, Callable[[], None] | None]]:
        chunk = order.chunk
        if chunk.op == "reduce_scatter":
            return self._scatter(chunk)
        if chunk.op == "all_gather":
            return self._gather(chunk)
        pieces = [piece for piece in chunk.pieces if piece.task not in order.unused]
        return [self._reduce(runs) for runs in self._by_buffer(pieces)]

    def _reduce(self, runs: list[BufferSlice]) -> tuple[dist.Work, Callable[[], None] | None]:
        """All-reduces ``runs`` of one buffer as one operation; see Note [Slices that are no neighbours]."""
        slices = [self._gradients.slice(run) for run in runs]
        sent = self._rounded(runs, slices)
        if len(sent) > 1 and not self._coalesces:
            together = torch.cat(sent)
            return self._all_reduce([together]), lambda: _copy(_cut(together, slices), slices)
        return self._all_reduce(sent), None if sent is slices else lambda: _copy(sent, slices)

    def _all_reduce(self, tensors: list[torch.Tensor]) -> dist.Work:
        # The group's own methods: those of torch.distributed look the group up and log, 30 µs for each operation.
        if len(tensors) == 1:
            return self._group.allreduce(tensors, AllreduceOptions())
        return self._group.allreduce_coalesced(tensors, AllreduceCoalescedOptions())

    def _rounded(self, runs: list[BufferSlice], slices: list[torch.Tensor]) -> list[torch.Tensor]:
        """What is sent for ``slices``, which are those of ``runs``: themselves where nothing is compressed."""
        if self._rounding is None:
            return slices
        return [self._rounding.round(run, values) for run, values in zip(runs, slices, strict=True)]

    def _scatter(self, chunk: Chunk) -> list[tuple[dist.Work, Callable[[], None] | None]]:
        """Reduces each buffer's part so that every rank keeps one Nth of the sum until it is gathered."""
        count = dist.get_world_size(self._group)
        works, shards = [], []
        for runs in self._by_buffer(chunk.pieces):
            payload = torch.cat(self._rounded(runs, [self._gradients.slice(run) for run in runs]))
            padded = torch.nn.functional.pad(payload, (0, -len(payload) % count))
            shard = padded.new_empty(len(padded) // count)
            work = dist.reduce_scatter_single(shard, padded, group=self._group, async_op=True)
            assert work is not None
            # The input must live until the operation is done: the closure keeps it.
            works.append((work, lambda padded=padded: None))
            shards.append((work, runs, shard))
        self._shards[chunk.pieces] = shards
        return works

    def _gather(self, chunk: Chunk) -> list[tuple[dist.Work, Callable[[], None] | None]]:
        if chunk.pieces not in self._shards:
            raise ScheduleError("an all-gather must name the pieces of one reduce-scatter before it, in its order")
        works = []
        for scattered, runs, shard in self._shards.pop(chunk.pieces):
            # Complete on the leader is not complete here.
            scattered.wait()
            whole = shard.new_empty(len(shard) * dist.get_world_size(self._group))
            slices = [self._gradients.slice(run) for run in runs]
            work = dist.all_gather_single(whole, shard, group=self._group, async_op=True)
            works.append((work, lambda whole=whole, slices=slices, shard=shard: _copy(_cut(whole, slices), slices)))
        return works

    def _by_buffer(self, pieces: Sequence[Piece]) -> list[list[BufferSlice]]:
        found: dict[int, list[BufferSlice]] = {}
        for run in self._gradients.runs(pieces):
            found.setdefault(run.buffer, []).append(run)
        return list(found.values())

    def _complete_all(self) -> None:
        try:
            while (sent := self._queue.get()) is not None:
                self._complete(sent)
        except BaseException as error:
            # A rank that is gone ends its collectives and its link: the link knows which rank it is.
            if not self._closing.wait(FAILURE_GRACE):
                text = str(error) if isinstance(error, PeerLost) else f"a collective failed: {error}"
                self._failed(PeerLost(f"{text}; {self.last()}"))

    def _go_on(self) -> None:
        if self._closing.is_set():
            raise PeerLost("this rank closes its attachment")

    def _complete(self, sent: Sent) -> None:
        if self._enqueues:
            if sent.event is not None:
                sent.event.synchronize()
        else:
            self._arrive(sent.order, sent.works)
        if self._keep:
            self.records.append(CommRecord(sent.order.chunk, sent.issued, time.perf_counter_ns()))
        self._under_way.popleft()
        sent.done(sent.order)
        if not self._enqueues:
            self._land(sent.order)

    def _arrive(
        self, order: CollectiveCommand, works: list[tuple[dist.Work, Callable[[], None] | None]]
    ) -> torch.cuda.Event | None:
        """Waits, the stream or the host, and unpacks."""
        with torch.no_grad(), self._streams.arriving():
            for work, unpack in works:
                finish(work, self._go_on, enqueues=self._enqueues, verdict=0)
                if unpack:
                    unpack()
            mark = self._streams.arrived()
        self._streams.landed((piece.task for piece in order.chunk.pieces), mark)
        return mark

    def _land(self, order: CollectiveCommand) -> None:
        if order.chunk.op == "reduce_scatter":
            return
        for piece in order.chunk.pieces:
            self._left[piece.task] -= piece.size
            if not self._left[piece.task]:
                self._left[piece.task] = self._tasks[piece.task].size
                self._landed(piece.task, piece.task not in order.unused)


def spelled(order: CollectiveCommand) -> bytes:
    """What all ranks must have in common of ``order``, for a hash.

    Names and sizes of tasks were compared once; their numbers stand for them.
    """
    numbers = [
        n for piece in order.chunk.pieces for n in (piece.task, piece.offset, piece.size, piece.task in order.unused)
    ]
    return order.chunk.op.encode() + struct.pack(f"<{len(numbers)}q", *numbers)


def describe(chunk: Chunk, tasks: Sequence[Task]) -> str:
    """``chunk`` for people: operation, first task, how many more, bytes."""
    first, *others = chunk.pieces
    more = f" +{len(others)}" if others else ""
    return f"{chunk.op} of task {tasks[first.task].name!r}{more}, {chunk.size} bytes"


def _cut(payload: torch.Tensor, places: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The parts of ``payload`` that belong to ``places``, one after the other; padding behind them is left out."""
    sizes = [len(place) for place in places]
    return payload[: sum(sizes)].split(sizes)


def _copy(values: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> None:
    for value, place in zip(values, places, strict=True):
        place.copy_(value)
