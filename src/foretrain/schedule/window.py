"""Queues that policies are built on: by priority under byte credit (Window), and in a fixed order (Buckets).

P3, ByteScheduler, PACE and Prophet share the first; DDP, MG-WFBP and DeAR the second."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import accumulate

from foretrain.tasks import Chunk, Done, Event, Op, Piece, Ready, Start, Task


class Window:
    """Sends the most urgent unit first, ``partition`` bytes at a time, while ``credit`` lasts.

    A *unit* is one task, or several that are sent as one tensor. Credit is the number of bytes that may be under way;
    it may be overdrawn by one chunk, and what was started is never recalled (ByteScheduler, SOSP'19 §4.2).
    The cost of a decision does not depend on how many units there are but for the O(log n) of a heap of integers that
    is touched once per unit, not once per chunk.

    Args:
        tasks: indexed by `Task.index`.
        units: task indices, the most urgent unit first; the place in this sequence is the priority.
        partition: largest chunk, bytes.
        credit: bytes under way at which nothing more is started.
        grain: units are fused until a chunk has this many bytes; less is held back while two chunks are under way,
            since it could not overtake them anyway and company may come. 0 fuses nothing.
    """

    __slots__ = (
        "_credit",
        "_flying",
        "_grain",
        "_heap",
        "_left",
        "_missing",
        "_partition",
        "_plain",
        "_queued",
        "_sizes",
        "_unit_of",
        "_units",
    )

    def __init__(
        self, tasks: Sequence[Task], units: Sequence[Sequence[int]], partition: int, credit: int, grain: int = 0
    ) -> None:
        self._units = [[(i, tasks[i].size) for i in unit] for unit in units]
        self._plain = [unit[0] if len(unit) == 1 else -1 for unit in units]
        self._sizes = [sum(tasks[i].size for i in unit) for unit in units]
        self._unit_of = {task: place for place, unit in enumerate(units) for task in unit}
        self._partition = partition
        self._credit = credit
        self._grain = min(grain, partition)
        self._flying = self._queued = 0
        self._heap: list[int] = []
        self._missing = [len(unit) for unit in units]
        self._left = [0] * len(units)

    def handle(self, event: Event) -> list[Start]:
        """Everything a policy does that is nothing but this window."""
        if type(event) is Done:
            self.done(event.chunk.size)
        elif type(event) is Ready:
            self.ready(event.task)
        return self.fill()

    def ready(self, task: int) -> None:
        """``task`` may be sent; its unit joins the queue when it is the last of it."""
        unit = self._unit_of[task]
        self._missing[unit] -= 1
        if not self._missing[unit]:
            self._missing[unit] = len(self._units[unit])
            self._left[unit] = self._sizes[unit]
            self._queued += self._sizes[unit]
            heappush(self._heap, unit)

    def done(self, size: int) -> None:
        """``size`` bytes have arrived: their credit comes back."""
        self._credit += size
        self._flying -= 1

    def fill(self) -> list[Start]:
        """Starts chunks until the credit is used up or nothing is ready."""
        if self._grain:
            return self._fill_fused()
        heap, starts = self._heap, []
        while heap and self._credit > 0:
            unit = heap[0]
            left = self._left[unit]
            size = self._partition
            if left <= size:
                size = left
                heappop(heap)
            self._left[unit] = left - size
            self._credit -= size
            offset, task = self._sizes[unit] - left, self._plain[unit]
            pieces = (Piece(task, offset, size),) if task >= 0 else cut(self._units[unit], offset, size)
            starts.append(Start(Chunk("all_reduce", pieces, size)))
        return starts

    def _fill_fused(self) -> list[Start]:
        starts = []
        while self._heap and self._credit > 0 and (self._flying < 2 or self._queued >= self._grain):
            chunk = self._gather()
            self._credit -= chunk.size
            self._queued -= chunk.size
            self._flying += 1
            starts.append(Start(chunk))
        return starts

    def _gather(self) -> Chunk:
        """The most urgent unit or its next part, and others behind it until there are ``grain`` bytes."""
        pieces: list[Piece] = []
        size = 0
        while self._heap and (size < self._grain or not pieces):
            unit = self._heap[0]
            left = self._left[unit]
            take = min(left, self._partition - size)
            pieces.extend(cut(self._units[unit], self._sizes[unit] - left, take))
            self._left[unit] = left - take
            size += take
            if take == left:
                heappop(self._heap)
        return Chunk("all_reduce", tuple(pieces), size)


def cut(unit: Sequence[tuple[int, int]], offset: int, size: int) -> tuple[Piece, ...]:
    """Return pieces that cover bytes ``[offset, offset + size)`` of tasks in a row, given as ``(task, size)``."""
    pieces = []
    for (task, length), end in zip(unit, accumulate(length for _, length in unit), strict=True):
        start, stop = max(offset, end - length), min(offset + size, end)
        if start < stop:
            pieces.append(Piece(task, start - (end - length), stop - start))
    return tuple(pieces)


def whole(op: Op, tasks: Sequence[Task], bucket: Sequence[int]) -> Chunk:
    """Return a chunk of all bytes of the tasks in ``bucket``."""
    pieces = tuple(Piece(i, 0, tasks[i].size) for i in bucket)
    return Chunk(op, pieces, sum(piece.size for piece in pieces))


class Buckets:
    """Starts bucket k when all its tasks are ready and buckets 0..k−1 have been started.

    Args:
        tasks: indexed by `Task.index`.
        buckets: task indices; every task in exactly one.
        op: what to do with each.
    """

    def __init__(self, tasks: Sequence[Task], buckets: Iterable[Sequence[int]], op: Op = "all_reduce") -> None:
        self.buckets = tuple(tuple(bucket) for bucket in buckets)
        self._chunks = [whole(op, tasks, bucket) for bucket in self.buckets]
        self._bucket_of = {task: place for place, bucket in enumerate(self.buckets) for task in bucket}
        self.reset()

    def reset(self) -> None:
        """Begin a new step: nothing is ready."""
        self._missing = [len(bucket) for bucket in self.buckets]
        self._next = 0

    def ready(self, task: int) -> list[Start]:
        """Record that ``task`` is ready; return the chunks that may start now, in order."""
        self._missing[self._bucket_of[task]] -= 1
        first = self._next
        while self._next < len(self._missing) and not self._missing[self._next]:
            self._next += 1
        return [Start(chunk) for chunk in self._chunks[first : self._next]]


def by_size(order: Sequence[int], tasks: Sequence[Task], caps: Sequence[int]) -> list[tuple[int, ...]]:
    """Split ``order`` into buckets as PyTorch's ``compute_bucket_assignment_by_size`` does for one dtype and device.

    A bucket is closed as soon as its size *reaches* the cap, so it may exceed it. ``caps[k]`` is for bucket k; the last
    cap serves all that follow.
    """
    buckets, bucket, size = [], [], 0
    for index in order:
        bucket.append(index)
        size += tasks[index].size
        if size >= caps[min(len(buckets), len(caps) - 1)]:
            buckets.append(tuple(bucket))
            bucket, size = [], 0
    if bucket:
        buckets.append(tuple(bucket))
    return buckets
