"""Placement of bytes on the servers of a parameter server; real and simulated ones share it.

A task larger than a limit is split into parts of nearly equal size; parts go, the largest first, to the server that has
the fewest bytes so far (longest processing time first: no server has more than a part above its share).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import Final

ALIGN: Final = 64
"""Parts begin at multiples of a cache line, so that no element of any type is cut."""


def split(size: int, limit: int) -> list[tuple[int, int]]:
    """Return offsets and sizes of the fewest parts of at most ``limit`` bytes, nearly equal, aligned."""
    step = max(ALIGN, limit - limit % ALIGN)
    count = -(-size // step)
    even = min(step, -(-size // count // ALIGN) * ALIGN)
    return [(offset, min(even, size - offset)) for offset in range(0, size, even)]


def balance(sizes: Sequence[int], shards: int) -> list[int]:
    """Return a shard for each part, longest first to the least loaded shard, the first of equal ones."""
    loads = [(0, shard) for shard in range(shards)]
    heapify(loads)
    homes = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, shard = loads[0]
        homes[index] = shard
        heapreplace(loads, (load + sizes[index], shard))
    return homes
