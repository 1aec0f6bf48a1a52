"""Buckets launched strictly in order: the mechanism that DDP, MG-WFBP and DeAR share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from foretrain.tasks import Chunk, Op, Piece, Start, Task


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
