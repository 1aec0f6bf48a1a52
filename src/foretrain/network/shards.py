"""Placement of bytes on the servers of a parameter server; real and simulated ones share it.

A task larger than a limit is split into parts of nearly equal size. Parts go, the most urgent first, to the server that
has the fewest bytes so far: no server has more than a part above its share, neither of all bytes nor of those that are
pushed together. All workers push in about the same order. Where that would lead them to one server after the other, its
link would be full, and those of the others idle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace
from typing import Final

from foretrain.network.switch_cluster import MESSAGE

ALIGN: Final = 64
"""Parts begin at multiples of a cache line, so that no element of any type is cut."""

_LEAST: Final = 128 << 10
"""Bytes of a part that is made smaller for the sake of balance: below it a message costs more than its bytes."""


def part_limit(knobs: Mapping[str, float], shards: int, message: int = MESSAGE) -> int:
    """Return the most bytes of a part, so that a partition of a policy with these ``knobs`` is on all of ``shards``.

    Args:
        knobs: of the policy. One without "partition" sends tensors, or slices, message by message.
        shards: servers.
        message: bytes of a message, at most.
    """
    if shards == 1:
        return message
    return min(message, max(_LEAST, int(knobs.get("partition", message)) // shards))


def split(size: int, limit: int) -> list[tuple[int, int]]:
    """Return offsets and sizes of the fewest parts of at most ``limit`` bytes, nearly equal, aligned."""
    step = max(ALIGN, limit - limit % ALIGN)
    count = -(-size // step)
    even = min(step, -(-size // count // ALIGN) * ALIGN)
    return [(offset, min(even, size - offset)) for offset in range(0, size, even)]


def balance(sizes: Sequence[int], urgencies: Sequence[int], shards: int) -> list[int]:
    """Return a shard for each part, the most urgent first to the least loaded shard, the first of equal ones."""
    loads = [(0, shard) for shard in range(shards)]
    heapify(loads)
    homes = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (urgencies[i], i)):
        load, shard = loads[0]
        homes[index] = shard
        heapreplace(loads, (load + sizes[index], shard))
    return homes
