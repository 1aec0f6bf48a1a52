"""Plans of collectives for one rank: what it sends to whom, what it receives from whom, and what it adds.

A plan is a tuple of legs, run one after the other. Within a leg, sending, receiving and adding overlap byte by byte, so
that a whole ring is one leg: each block that is sent is the one that was received before it.

Note [Equal bits]. On a ring a sum is computed on one rank, along one path, and copied to the others. Recursive doubling
adds the same pairs of partial sums on all ranks; only which of the two comes first differs, and a + b is b + a to the
bit, unless both are NaN: a NaN is one on all ranks, but may not have the same payload.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

Operation: TypeAlias = Literal["all_reduce", "reduce_scatter", "all_gather"]

KINDS = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8, "uint8": 1}
"""Types of elements, in the order of ring.cpp, and their bytes."""

DOUBLING_LIMIT = 64 << 10
"""Most bytes that a power of two of ranks sums by recursive doubling, whose few steps each send all bytes; a ring of N
sends 2/N of them in each of 2N − 2 steps. On loopback they took as long at about 200 KiB, for 2 and for 4 ranks; a slow
network, where bytes cost more, wants less.
"""


class Extent(NamedTuple):
    """Bytes of the array."""

    offset: int
    size: int


class Leg(NamedTuple):
    """Stream to one peer and stream from one, at the same time.

    Attributes:
        to: rank that gets ``sends``, in their order.
        from_: rank whose bytes go to ``receives``, in their order.
        head: bytes that may be sent before any has come; each byte that has come allows one more.
        lag: whether a byte is added only where ours has been sent, because it is the same place.
        adding: the first so many bytes that come are added, the others replace what is there.
        sends: no extent is empty.
        receives: no extent is empty, and none contains the end of ``adding``.
    """

    to: int
    from_: int
    head: int
    lag: bool
    adding: int
    sends: tuple[Extent, ...]
    receives: tuple[Extent, ...]


def legs(operation: Operation, rank: int, ranks: int, count: int, item: int) -> tuple[Leg, ...]:
    """Return the plan of ``rank`` for an array of ``count`` elements of ``item`` bytes."""
    if ranks == 1 or count == 0:
        return ()
    if operation == "all_reduce" and _doubles(ranks, count * item):
        return _doubling(rank, ranks, count * item)
    edges = [block * count // ranks * item for block in range(ranks + 1)]
    scatter = [(rank - 1 - step) % ranks for step in range(ranks)]
    gather = [(rank - step) % ranks for step in range(ranks)]
    first = [] if operation == "all_gather" else scatter
    then = [] if operation == "reduce_scatter" else gather
    sends, receives = first[:-1] + then[:-1], first[1:] + then[1:]

    def extents(blocks: list[int]) -> tuple[Extent, ...]:
        found = (Extent(edges[block], edges[block + 1] - edges[block]) for block in blocks)
        return tuple(extent for extent in found if extent.size)

    head, adding = (sum(extent.size for extent in extents(blocks)) for blocks in (sends[:1], first[1:]))
    return (Leg((rank + 1) % ranks, (rank - 1) % ranks, head, False, adding, extents(sends), extents(receives)),)


def peers(rank: int, ranks: int) -> tuple[int, ...]:
    """Return the ranks that ``rank`` exchanges bytes with, in ascending order."""
    around = {(rank + 1) % ranks, (rank - 1) % ranks}
    if _is_power_of_two(ranks):
        around |= {rank ^ step for step in _steps(ranks)}
    return tuple(sorted(around - {rank}))


def _doubles(ranks: int, size: int) -> bool:
    return _is_power_of_two(ranks) and size <= DOUBLING_LIMIT


def _doubling(rank: int, ranks: int, size: int) -> tuple[Leg, ...]:
    whole = (Extent(0, size),)
    return tuple(Leg(rank ^ step, rank ^ step, size, True, size, whole, whole) for step in _steps(ranks))


def _steps(ranks: int) -> list[int]:
    return [1 << bit for bit in range(ranks.bit_length() - 1)]


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
