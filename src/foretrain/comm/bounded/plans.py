"""Plans of operations for the bounded transport: stages of arrays to send and to receive, and of sums.

    transpose          each rank sums one block and sends the sum to all (OptiReduce's name; also "direct"): loses least
    ring               2N − 2 stages; a block that is lost on its way takes all that was added before with it
    halving_doubling   2 log2 N stages, for powers of two
    ps                 a server, rank N, sums everything and sends the sum to all; or it updates parameters by the sum,
                       and sends these

A stage begins when everything of the one before has come and was added. Nothing is sent that a sum of the same or a
later stage changes: its packets may have to go again.

Note [Budgets]. Sums lose at most the tolerance p of each rank's contribution: transpose crosses one hop, and so does
what a server sums, and has all of it; a ring has p / (N − 1) per hop and halving-doubling p / log2 N, so that what adds
up along the way stays below p. Copies of sums lose nothing, or ranks with parameters of their own would drift apart; of
a server's parameters each rank's copy may lose p, since the next copy comes from the server again.

Note [Order of sums]. It is that of `foretrain.comm.collectives`: a block's sum begins on the rank after its owner and
goes round; sums of at most `DOUBLING_LIMIT` bytes on powers of two are added in pairs. So p = 0 gives the same bits, by
transpose, ring and server.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

from foretrain.comm.collectives.plan import DOUBLING_LIMIT, Operation

Algorithm: TypeAlias = Literal["transpose", "ring", "halving_doubling", "ps"]
BoundedOperation: TypeAlias = Operation | Literal["update"]
"""Operation of these collectives: "update" pushes gradients to a server and pulls parameters."""


class Send(NamedTuple):
    """Array for another rank.

    Attributes:
        to: rank.
        offset: first byte, of the values.
        size: bytes.
        reliable: whether all of it must arrive.
        pulled: whether it is of the array that is pulled, and not of the values.
    """

    to: int
    offset: int
    size: int
    reliable: bool
    pulled: bool = False


class Receive(NamedTuple):
    """Array from another rank.

    Attributes:
        source: rank.
        scratch: whether it is placed in memory of the operation's own, and not in the values.
        target: its first byte there.
        place: the byte of the values that its first one belongs to.
        size: bytes.
        need: bytes that are enough.
        pulled: whether it is placed in the array that is pulled, where what does not come stays what it was.
    """

    source: int
    scratch: bool
    target: int
    place: int
    size: int
    need: int
    pulled: bool = False


class Sum(NamedTuple):
    """Addition of ``size`` bytes of one memory to those of another."""

    into_scratch: bool
    into: int
    from_scratch: bool
    from_: int
    size: int


class Stage(NamedTuple):
    """Stage: its sums begin when all is received."""

    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]
    sums: tuple[Sum, ...] = ()


def stages(
    operation: BoundedOperation, algorithm: Algorithm, rank: int, ranks: int, count: int, item: int, tolerance: float
) -> tuple[Stage, ...]:
    """Return the plan of ``rank`` for an array of ``count`` elements of ``item`` bytes, of which some may be lost.

    Rank ``ranks`` is the server, if there is one, which an update needs.
    """
    if ranks == 1 or count == 0:
        return ()
    if operation == "update":
        return _updated(rank, ranks, _Blocks(ranks, count, item), tolerance)
    if algorithm == "ps":
        return _served(operation, rank, ranks, _Blocks(ranks, count, item), tolerance)
    blocks = _Blocks(ranks, count, item)
    adds, copies = operation != "all_gather", operation != "reduce_scatter"
    pairs = adds and copies and _is_power_of_two(ranks) and count * item <= DOUBLING_LIMIT
    hop = of_hop(algorithm, tolerance, ranks)
    if algorithm == "transpose" or pairs:
        found = _transpose(rank, ranks, blocks, tolerance, pairs)
    elif algorithm == "ring":
        found = _ring(rank, ranks, blocks, hop)
    else:
        found = _halving_doubling(rank, ranks, blocks, hop)
    made = tuple(found)
    half = len(made) // 2
    return made[0 if adds else half : len(made) if copies else half]


def of_hop(algorithm: Algorithm, tolerance: float, ranks: int) -> float:
    """Return the share that may be lost on one hop, where a sum may lose ``tolerance``; see Note [Budgets]."""
    hops = {"ring": ranks - 1, "halving_doubling": (ranks - 1).bit_length()}
    return tolerance / hops.get(algorithm, 1)


def encode(plan: tuple[Stage, ...]) -> list[int]:
    """Return the numbers of ``plan`` as engine.cpp reads them."""
    numbers: list[int] = []
    for stage in plan:
        numbers += [len(stage.sends), len(stage.receives), len(stage.sums)]
        numbers += [int(number) for part in stage for each in part for number in each]
    return numbers


def scratch(plan: tuple[Stage, ...]) -> int:
    """Return the bytes of memory of its own that an operation needs."""
    return max((r.target + r.size for stage in plan for r in stage.receives if r.scratch), default=0)


class _Blocks:
    """Cut of the array into as many blocks as ranks."""

    def __init__(self, ranks: int, count: int, item: int) -> None:
        self.item = item
        self._edges = [block * count // ranks * item for block in range(ranks + 1)]

    def extent(self, first: int, behind: int) -> tuple[int, int]:
        """Return the first byte of these blocks, and how many they are."""
        return self._edges[first], self._edges[behind] - self._edges[first]


def _need(size: int, tolerance: float) -> int:
    return size - int(size * tolerance)


def _transpose(rank: int, ranks: int, blocks: _Blocks, tolerance: float, pairs: bool) -> Iterator[Stage]:
    others = [(rank + step) % ranks for step in range(1, ranks)]
    own, size = blocks.extent(rank, rank + 1)
    extents = {peer: blocks.extent(peer, peer + 1) for peer in others}
    copies = {peer: k * size for k, peer in enumerate(others)}
    yield Stage(
        tuple(Send(peer, *extents[peer], tolerance == 0) for peer in others if extents[peer][1]),
        tuple(Receive(peer, True, copies[peer], own, size, _need(size, tolerance)) for peer in others if size),
        tuple(_paired(rank, ranks, own, size, copies) if pairs else _round(own, size, copies)) if size else (),
    )
    yield Stage(
        tuple(Send(peer, own, size, True) for peer in others if size),
        tuple(Receive(peer, False, at, at, n, n) for peer, (at, n) in extents.items() if n),
    )


def _round(own: int, size: int, copies: dict[int, int]) -> Iterator[Sum]:
    """Add the others' blocks, from the next rank on, and then to the own one."""
    first, *others = copies.values()
    for copy in others:
        yield Sum(True, first, True, copy, size)
    yield Sum(False, own, True, first, size)


def _paired(rank: int, ranks: int, own: int, size: int, copies: dict[int, int]) -> Iterator[Sum]:
    """Add pairs of ranks, then pairs of pairs; the sum that contains ``rank`` is in its own block."""

    def holder(first: int, width: int) -> int:
        return rank if first <= rank < first + width else first

    width = 1
    while width < ranks:
        for first in range(0, ranks, 2 * width):
            into, from_ = holder(first, width), holder(first + width, width)
            if from_ == rank:
                into, from_ = from_, into
            yield Sum(into != rank, copies.get(into, own), from_ != rank, copies.get(from_, own), size)
        width *= 2


def _ring(rank: int, ranks: int, blocks: _Blocks, tolerance: float) -> Iterator[Stage]:
    after, ahead = (rank + 1) % ranks, (rank - 1) % ranks

    def stage(sent: int, received: int, adds: bool) -> Stage:
        (at, size), (to, coming) = blocks.extent(sent, sent + 1), blocks.extent(received, received + 1)
        need = _need(coming, tolerance) if adds else coming
        sends = (Send(after, at, size, not adds or tolerance == 0),) if size else ()
        if not coming:
            return Stage(sends, ())
        receive = Receive(ahead, adds, 0 if adds else to, to, coming, need)
        return Stage(sends, (receive,), (Sum(False, to, True, 0, coming),) if adds else ())

    for step in range(ranks - 1):
        made = stage((rank - 1 - step) % ranks, (rank - 2 - step) % ranks, True)
        yield _shifted(made, step, blocks, ranks)
    for step in range(ranks - 1):
        yield stage((rank - step) % ranks, (rank - 1 - step) % ranks, False)


def _shifted(stage: Stage, step: int, blocks: _Blocks, ranks: int) -> Stage:
    """Return ``stage`` with scratch memory of its own: a peer may be ahead, and send the next stage's array."""
    if not stage.receives:
        return stage
    widest = max(blocks.extent(block, block + 1)[1] for block in range(ranks))
    (receive,), (sum_,) = stage.receives, stage.sums
    return Stage(stage.sends, (receive._replace(target=step * widest),), (sum_._replace(from_=step * widest),))


def _served(operation: Operation, rank: int, ranks: int, blocks: _Blocks, tolerance: float) -> tuple[Stage, Stage]:
    """Everything goes to the server and comes back from it, but of a part only to or from its owner."""
    everything, own = blocks.extent(0, ranks), blocks.extent(rank % ranks, rank % ranks + 1)
    if rank < ranks:
        up, down = (
            (own if operation == "all_gather" else everything),
            (own if operation == "reduce_scatter" else everything),
        )
        sends = (Send(ranks, *up, operation == "all_gather" or tolerance == 0),) if up[1] else ()
        receives = (Receive(ranks, False, down[0], *down, down[1]),) if down[1] else ()
        return Stage(sends, ()), Stage((), receives)
    parts = {peer: blocks.extent(peer, peer + 1) for peer in range(ranks)}
    whole = everything[1]
    if operation == "all_gather":
        took = tuple(Receive(peer, False, at, at, size, size) for peer, (at, size) in parts.items() if size)
        return Stage((), took), Stage(tuple(Send(peer, 0, whole, True) for peer in range(ranks)), ())
    copies = {peer: (peer - 1) * whole for peer in range(1, ranks)}
    took = tuple(
        Receive(peer, peer > 0, copies.get(peer, 0), 0, whole, _need(whole, tolerance)) for peer in range(ranks)
    )
    pairs = operation == "all_reduce" and _is_power_of_two(ranks) and whole <= DOUBLING_LIMIT
    sums = tuple(_paired(0, ranks, 0, whole, copies) if pairs else _served_sums(ranks, parts, copies))
    gave = (Send(peer, *(parts[peer] if operation == "reduce_scatter" else everything), True) for peer in range(ranks))
    return Stage((), took, sums), Stage(tuple(send for send in gave if send.size), ())


def _updated(rank: int, ranks: int, blocks: _Blocks, tolerance: float) -> tuple[Stage, Stage]:
    """Replace, in the plan of a sum, the way back: it is of the array that is pulled, and may lose as much."""
    forth, back = _served("all_reduce", rank, ranks, blocks, tolerance)
    sends = tuple(each._replace(reliable=tolerance == 0, pulled=True) for each in back.sends)
    receives = tuple(each._replace(need=_need(each.size, tolerance), pulled=True) for each in back.receives)
    return forth, Stage(sends, receives)


def _served_sums(ranks: int, parts: dict[int, tuple[int, int]], copies: dict[int, int]) -> Iterator[Sum]:
    """Add each block in the order of a ring; rank 0's copy is in the values, and so is the sum."""
    for owner, (at, size) in parts.items():
        order = [(owner + step) % ranks for step in range(1, ranks + 1)]
        into = order[0]
        for peer in order[1:] if size else ():
            if peer == 0:
                yield Sum(False, at, True, copies[into] + at, size)
                into = 0
            else:
                yield Sum(into != 0, copies.get(into, 0) + at, True, copies[peer] + at, size)


def _halving_doubling(rank: int, ranks: int, blocks: _Blocks, tolerance: float) -> Iterator[Stage]:
    copies: list[Stage] = []
    first, width, used = 0, ranks, 0
    while width > 1:
        width //= 2
        upper = bool(rank & width)
        peer, kept, given = rank ^ width, first + width * upper, first + width * (not upper)
        (at, size), (to, coming) = blocks.extent(given, given + width), blocks.extent(kept, kept + width)
        sends = (Send(peer, at, size, tolerance == 0),) if size else ()
        if coming:
            receive = Receive(peer, True, used, to, coming, _need(coming, tolerance))
            yield Stage(sends, (receive,), (Sum(False, to, True, used, coming),))
        else:
            yield Stage(sends, ())
        used += coming
        back = (Receive(peer, False, at, at, size, size),) if size else ()
        copies.insert(0, Stage((Send(peer, to, coming, True),) if coming else (), back))
        first = kept
    yield from copies


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
