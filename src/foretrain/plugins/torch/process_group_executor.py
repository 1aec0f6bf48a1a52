"""Executor of collectives over torch.distributed; see Note [Two arrivals].

On a GPU credit returns when a collective has completed, while the model may go on as soon as everything it needs is
*enqueued*.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._C._distributed_c10d import AllreduceCoalescedOptions, AllreduceOptions

from foretrain.comm.bounded.ledger import Ledger
from foretrain.comm.buffers import BufferSlice
from foretrain.comm.collectives.executor import CollectiveExecutor, Collectives, Work
from foretrain.comm.coordinator.protocol import CollectiveCommand
from foretrain.comm.event_loop import POLL_INTERVAL
from foretrain.errors import ScheduleError
from foretrain.plugins.torch.gradient_buffer import GradientBuffer, Rounding
from foretrain.plugins.torch.streams import HostStreams, coalesces, enqueues, finish
from foretrain.tasks import Chunk, Op, Piece, Task

# Note [Two arrivals]
# On a CPU backend (gloo) a work's wait() returns when the sum is there: a chunk lands when it is complete, on the
# completing thread. NCCL's wait() only makes the current stream wait, so there a chunk *lands* right after it is
# issued: its readers are enqueued behind it, through the arrival stream. Its credit still returns when an event behind
# it has been reached, for which the completing thread blocks: the host is far ahead of the device, and polling would
# take the interpreter from the model. `streams.abort` ends such a wait.

# Note [Slices that are no neighbours]
# A chunk that fuses a small gradient with the rest of a larger one is two slices of the flat buffer. Copying them
# together, and the sum apart, cost 0.6 ms per megabyte on the threads that decide; gloo's coalesced all-reduce copies
# as much on threads of its own, 0.1 ms, and NCCL's does not copy at all. The sums are the same bits. gloo has no
# coalesced all-reduce on a GPU, so there slices are still copied.

_SUM, _SUM_COALESCED = AllreduceOptions(), AllreduceCoalescedOptions()


class TensorOperations(Protocol):
    """Collectives on tensors, which all ranks begin in the same order.

    Attributes:
        enqueues: whether they complete on a device, behind which readers are enqueued.
        coalesces: whether one all-reduce can take several tensors.
        ranks: N.
    """

    enqueues: bool
    coalesces: bool
    ranks: int

    def all_reduce(self, tensors: list[torch.Tensor], places: list[BufferSlice]) -> Any:
        """Begin to replace ``tensors``, which are of ``places``, by their sums; return the operation."""
        ...

    def reduce_scatter(self, padded: torch.Tensor, places: list[BufferSlice]) -> tuple[Any, torch.Tensor]:
        """Begin to sum ``padded``, which is of ``places``; return the operation, and this rank's Nth of the sum."""
        ...

    def all_gather(self, shard: torch.Tensor, places: list[BufferSlice]) -> tuple[Any, torch.Tensor]:
        """Begin to collect every rank's ``shard`` of ``places``; return the operation, and all, one after the other."""
        ...

    def finish(self, work: Any, check: Callable[[], None]) -> None:
        """Wait for an operation, and call ``check`` now and then."""
        ...


class GroupOperations:
    """`TensorOperations` of a process group of ``ranks``, for these collectives alone, on tensors of ``device``."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, ranks: int) -> None:
        self._group, self.ranks = group, ranks
        self.enqueues, self.coalesces = enqueues(group, device), coalesces(group, device)

    def all_reduce(self, tensors: list[torch.Tensor], places: list[BufferSlice]) -> dist.Work:
        """Begin to replace ``tensors`` by their sums; return the operation."""
        del places
        # The group's own methods: those of torch.distributed look the group up and log, 30 µs for each operation.
        if len(tensors) == 1:
            return self._group.allreduce(tensors, _SUM)
        return self._group.allreduce_coalesced(tensors, _SUM_COALESCED)

    def reduce_scatter(self, padded: torch.Tensor, places: list[BufferSlice]) -> tuple[dist.Work, torch.Tensor]:
        """Begin to sum ``padded``; return the operation, and this rank's Nth of the sum."""
        del places
        shard = padded.new_empty(len(padded) // self.ranks)
        work = dist.reduce_scatter_single(shard, padded, group=self._group, async_op=True)
        assert work is not None
        return work, shard

    def all_gather(self, shard: torch.Tensor, places: list[BufferSlice]) -> tuple[dist.Work, torch.Tensor]:
        """Begin to collect every rank's ``shard``; return the operation, and all of them one after the other."""
        del places
        whole = shard.new_empty(len(shard) * self.ranks)
        work = dist.all_gather_single(whole, shard, group=self._group, async_op=True)
        assert work is not None
        return work, whole

    def finish(self, work: dist.Work, check: Callable[[], None]) -> None:
        """Wait for an operation, and call ``check`` now and then."""
        finish(work, check, enqueues=self.enqueues, grace=0)


class HostOperations:
    """`TensorOperations` of ``collectives`` on tensors of the CPU, by their memory; ``ledger`` books what they lose."""

    enqueues = coalesces = False

    def __init__(self, collectives: Collectives, ledger: Ledger | None = None) -> None:
        self._collectives, self.ranks, self._ledger = collectives, collectives.ranks, ledger
        self._places: dict[Work, list[BufferSlice]] = {}

    def all_reduce(self, tensors: list[torch.Tensor], places: list[BufferSlice]) -> Work:
        """Begin to replace ``tensors``, of which there is one, by their sums; return the operation."""
        (tensor,) = tensors
        return self._begun("all_reduce", tensor, places)

    def reduce_scatter(self, padded: torch.Tensor, places: list[BufferSlice]) -> tuple[Work, torch.Tensor]:
        """Begin to sum ``padded``; return the operation, and this rank's Nth of the sum."""
        work = self._begun("reduce_scatter", padded, places)
        return work, padded.chunk(self.ranks)[self._collectives.rank]

    def all_gather(self, shard: torch.Tensor, places: list[BufferSlice]) -> tuple[Work, torch.Tensor]:
        """Begin to collect every rank's ``shard`` of ``places``; return the operation, and all, one after the other."""
        whole = shard.repeat(self.ranks)
        return self._begun("all_gather", whole, places), whole

    def _begun(self, operation: Op, tensor: torch.Tensor, places: list[BufferSlice]) -> Work:
        hint = self._ledger.hint(operation, places) if self._ledger is not None else None
        begin = getattr(self._collectives, operation)
        work = begin(memory(tensor), bfloat16=tensor.dtype == torch.bfloat16, hint=hint)
        if self._ledger is not None and operation != "all_gather":
            self._places[work] = places
        return work

    def finish(self, work: Work, check: Callable[[], None]) -> None:
        """Wait for an operation, and call ``check`` now and then."""
        while not work.wait(POLL_INTERVAL):
            check()
        if self._ledger is not None and (places := self._places.pop(work, None)) is not None:
            self._ledger.note(places, work)


def memory(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the memory of ``tensor``; of bfloat16 the bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


IssuedWork: TypeAlias = tuple[Any, Callable[[], None] | None]
"""Collective, and what unpacks its result if that was not reduced in place."""


class ProcessGroupExecutor(CollectiveExecutor[list[IssuedWork]]):
    """Executor of collectives on the tensors of gradients.

    Args:
        gradients: the flat buffers.
        tasks: indexed by task.
        operations: the collectives, for these gradients alone.
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
        operations: TensorOperations,
        streams: HostStreams,
        rounding: Rounding | None,
        landed: Callable[[int, bool], None],
        failed: Callable[[BaseException], None],
        keep: bool = False,
    ) -> None:
        self._gradients, self._operations, self._streams, self._rounding = gradients, operations, streams, rounding
        self._shards: dict[tuple[Piece, ...], list[tuple[Any, list[BufferSlice], torch.Tensor]]] = {}
        super().__init__(tasks, landed, failed, enqueues=operations.enqueues, keep=keep)

    def _issue(self, command: CollectiveCommand) -> list[IssuedWork]:
        chunk = command.chunk
        # A reduce-scatter sends unused tasks as well; see `_scatter`.
        whole = chunk.op != "all_reduce"
        used = [piece.task for piece in chunk.pieces if whole or piece.task not in command.unused]
        with self._streams.issuing(used):
            return self._begin(command)

    def _begin(self, command: CollectiveCommand) -> list[IssuedWork]:
        chunk = command.chunk
        if chunk.op == "reduce_scatter":
            return self._scatter(chunk)
        if chunk.op == "all_gather":
            return self._gather(chunk)
        pieces = [piece for piece in chunk.pieces if piece.task not in command.unused]
        return [self._reduce(places) for places in self._by_buffer(pieces)]

    def _reduce(self, places: list[BufferSlice]) -> IssuedWork:
        """All-reduce ``places`` of one buffer as one operation; see Note [Slices that are no neighbours]."""
        values = self._values(places)
        sent = self._rounded(places, values)
        if len(sent) > 1 and not self._operations.coalesces:
            together = torch.cat(sent)
            return self._operations.all_reduce([together], places), lambda: _unpack(together, values)
        return self._operations.all_reduce(sent, places), None if sent is values else lambda: _copy(sent, values)

    def _values(self, places: list[BufferSlice]) -> list[torch.Tensor]:
        return [self._gradients.slice(place) for place in places]

    def _rounded(self, places: list[BufferSlice], values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return compressed ``values``, the elements of ``places``; themselves without compression."""
        if self._rounding is None:
            return values
        return [self._rounding.round(place, each) for place, each in zip(places, values, strict=True)]

    def _scatter(self, chunk: Chunk) -> list[IssuedWork]:
        """Reduce-scatter each buffer's part; every rank keeps one Nth of the sum until it is gathered."""
        works, shards = [], []
        for places in self._by_buffer(chunk.pieces):
            payload = torch.cat(self._rounded(places, self._values(places)))
            padded = torch.nn.functional.pad(payload, (0, -len(payload) % self._operations.ranks))
            work, shard = self._operations.reduce_scatter(padded, places)
            # The input must live until the operation is done: the closure keeps it.
            works.append((work, lambda padded=padded: None))
            shards.append((work, places, shard))
        self._shards[chunk.pieces] = shards
        return works

    def _gather(self, chunk: Chunk) -> list[IssuedWork]:
        if chunk.pieces not in self._shards:
            raise ScheduleError("an all-gather must name the pieces of one reduce-scatter before it, in its order")
        works = []
        for scattered, places, shard in self._shards.pop(chunk.pieces):
            # It may be complete on the coordinator and not here.
            scattered.wait()
            work, whole = self._operations.all_gather(shard, places)
            values = self._values(places)
            # The input must live until the operation is done: the closure keeps it.
            works.append((work, lambda whole=whole, values=values, shard=shard: _unpack(whole, values)))
        return works

    def _by_buffer(self, pieces: Sequence[Piece]) -> list[list[BufferSlice]]:
        return [list(places) for _, places in groupby(self._gradients.runs(pieces), lambda place: place.buffer)]

    def _arrive(self, command: CollectiveCommand, work: list[IssuedWork]) -> torch.cuda.Event | None:
        with self._streams.arriving():
            for each, unpack in work:
                self._operations.finish(each, self._check_open)
                if unpack:
                    unpack()
            mark = self._streams.arrived()
        self._streams.landed((piece.task for piece in command.chunk.pieces), mark)
        return mark


def _unpack(payload: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Copy ``payload`` to ``targets``, one after the other; padding behind them is left out."""
    sizes = [len(target) for target in targets]
    _copy(payload[: sum(sizes)].split(sizes), targets)


def _copy(values: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for value, target in zip(values, targets, strict=True):
        target.copy_(value)
