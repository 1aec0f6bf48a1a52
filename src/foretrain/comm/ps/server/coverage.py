"""Coverage of a part: the workers that have pushed each of its bytes.

Each worker cuts its gradients as its own engine decides, so that the ranges of two of them need not agree. A byte may
be summed when all have pushed it, in whatever ranges.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

Range = tuple[int, int]
"""Bytes ``[start, end)``."""


class Coverage:
    """Pushed bytes of a part of ``size`` bytes, by worker of ``group``, given as a bit mask.

    The part is a sequence of ranges: the workers in ``_masks[k]`` have pushed ``_edges[k]`` to ``_edges[k + 1]``. There
    are at most twice as many as were pushed.
    """

    def __init__(self, size: int, group: int) -> None:
        self._edges, self._masks = [0, size], [0]
        self._group = group
        self._left = size
        """Bytes that some worker has not pushed."""

    @property
    def whole(self) -> bool:
        """Return whether all workers have pushed all bytes."""
        return not self._left

    def add(self, worker: int, start: int, end: int) -> tuple[list[Range], list[Range]]:
        """Note that ``worker`` has pushed ``[start, end)``; return the new ranges, and those that are now complete."""
        new: list[Range] = []
        complete: list[Range] = []
        first, last = self._cut(start), self._cut(end)
        bit = 1 << worker
        for k in range(first, last):
            if self._masks[k] & bit:
                continue
            self._masks[k] |= bit
            _extend(new, self._edges[k], self._edges[k + 1])
            if self._masks[k] & self._group == self._group:
                _extend(complete, self._edges[k], self._edges[k + 1])
        self._join(first, last)
        self._left -= _bytes(complete)
        return new, complete

    def remove_worker(self, worker: int) -> list[Range]:
        """Forget ``worker``, which is lost, in all incomplete ranges; return those that all others have pushed."""
        bit, before = 1 << worker, self._group
        self._group &= ~bit
        complete: list[Range] = []
        for k, mask in enumerate(self._masks):
            if mask & before == before:
                continue
            self._masks[k] = mask = mask & ~bit
            if self._group and mask & self._group == self._group:
                _extend(complete, self._edges[k], self._edges[k + 1])
        self._left -= _bytes(complete)
        return complete

    def complete(self, start: int, end: int) -> list[Range]:
        """Return the ranges of ``[start, end)`` that all have pushed."""
        found: list[Range] = []
        for k in range(bisect_right(self._edges, start) - 1, len(self._masks)):
            if self._edges[k] >= end:
                break
            if self._masks[k] & self._group == self._group:
                _extend(found, max(start, self._edges[k]), min(end, self._edges[k + 1]))
        return found

    def missing(self) -> dict[int, int]:
        """Return the bytes that each worker of the group has yet to push, if any."""
        left: dict[int, int] = {}
        for k, mask in enumerate(self._masks):
            for worker in range(self._group.bit_length()):
                if self._group >> worker & 1 and not mask >> worker & 1:
                    left[worker] = left.get(worker, 0) + self._edges[k + 1] - self._edges[k]
        return left

    def _cut(self, at: int) -> int:
        """Return the place of edge ``at``, inserted if there was none."""
        place = bisect_left(self._edges, at)
        if self._edges[place] != at:
            self._edges.insert(place, at)
            self._masks.insert(place, self._masks[place - 1])
        return place

    def _join(self, first: int, last: int) -> None:
        """Remove edges from ``first`` to ``last`` between equal ranges."""
        for k in range(min(last, len(self._masks) - 1), max(first, 1) - 1, -1):
            if self._masks[k] == self._masks[k - 1]:
                del self._edges[k], self._masks[k]


def _extend(ranges: list[Range], start: int, end: int) -> None:
    """Append ``[start, end)``, which lies behind all of ``ranges``, or join it to the last."""
    if ranges and ranges[-1][1] == start:
        ranges[-1] = (ranges[-1][0], end)
    else:
        ranges.append((start, end))


def _bytes(ranges: list[Range]) -> int:
    return sum(end - start for start, end in ranges)
