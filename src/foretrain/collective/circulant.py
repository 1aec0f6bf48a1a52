"""Exchanges on circulant graphs: reduce-scatter and all-gather among any number of ranks, with nothing sent twice.

Rank r counts the blocks from its own: position i is block (r + i) mod k. In the beginning it holds a part of the sum at
each of k positions; a *round* sends the last c of the s positions that are left to the rank r + d, where they are
positions again, d lower, and are added. After the last round only position 0 is left, and it is the whole sum.

    before:  0 … … … … … s−1        sent: s−c … s−1, to rank r + d        c ≤ d ≤ s − c

Each block of each rank is sent exactly once, k − 1 blocks in all, which is the least possible; with c = ⌊s/2⌋ it takes
⌈log2 k⌉ rounds, which is the least possible too (Träff, *Optimal, Non-pipelined Reduce-scatter and Allreduce
Algorithms*, doi:10.34726/10760; the skips are his, the freedom in c and d, which `circle` uses for odd skips, is ours).
The all-gather is the same backwards. With k = 2 a round is the exchange of halves that halving-doubling consists of, so
a *product* of such graphs, one after the other on ever smaller data, is halving-doubling, and more.

Halving-doubling: halves are exchanged with one partner after another, on ever smaller data, and back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from foretrain.collective.plan import Operation, Plan, assembled


@dataclass(frozen=True, slots=True)
class CirculantRound:
    """Round in which the last ``sent`` of ``left`` positions go to the rank that is ``skip`` further on."""

    skip: int
    sent: int
    left: int


@dataclass(frozen=True, slots=True)
class Circle:
    """``size`` ranks in a circle and the rounds of their reduce-scatter."""

    size: int
    rounds: tuple[CirculantRound, ...]


def circle(size: int, *, odd: bool = False) -> Circle:
    """Return the circle with the fewest rounds, ⌈log2 size⌉; with ``odd`` skips only, at most one more.

    An odd skip changes the parity of a rank in a circle of even size. Where s is a multiple of 4 no odd d fits
    c = s/2; then c = s/2 − 1. So s − 2 at least halves, and s ≤ 2 after ⌊log2(size − 2)⌋ + 1 rounds.
    """
    rounds, left = [], size
    while left > 1:
        sent = skip = left // 2
        if odd and skip % 2 == 0:
            if left % 2:
                skip += 1
            else:
                sent = skip = sent - 1
        rounds.append(CirculantRound(skip, sent, left))
        left -= sent
    return Circle(size, tuple(rounds))


@dataclass(frozen=True, slots=True)
class _Event:
    """Round of a product of circles, in which every rank takes part.

    Attributes:
        circle: which of the circles.
        skip: how much further on the receiver is; negative in an all-gather.
        read: positions that the sender sends.
        written: positions that the receiver adds to or overwrites.
        adds: whether it adds.
        size: ranks in the circle.
    """

    circle: int
    skip: int
    read: range
    written: range
    adds: bool
    size: int

    @property
    def goes(self) -> tuple[int, int]:
        """Return the receiver, as seen by the sender."""
        return self.circle, self.skip % self.size

    @property
    def comes(self) -> tuple[int, int]:
        """Return the sender, as seen by the receiver."""
        return self.circle, -self.skip % self.size


def _events(circles: Sequence[Circle], operation: Operation) -> list[_Event]:
    there, back = [], []
    for index, one in enumerate(circles):
        for turn in one.rounds:
            top = range(turn.left - turn.sent, turn.left)
            lower = range(top.start - turn.skip, top.stop - turn.skip)
            there.append(_Event(index, turn.skip, top, lower, True, one.size))
            back.append(_Event(index, -turn.skip, lower, top, False, one.size))
    return (there if operation != "all_gather" else []) + (back[::-1] if operation != "reduce_scatter" else [])


def _overlap(a: _Event, written: range, b: _Event, read: range) -> bool:
    """Return whether windows of two events share a block; later circles move what is at position 0 of earlier ones."""
    if a.circle != b.circle:
        return 0 in (written if a.circle < b.circle else read)
    return max(written.start, read.start) < min(written.stop, read.stop)


_Waits: TypeAlias = tuple[int | None, set[int]]


def _waits(events: Sequence[_Event]) -> list[_Waits]:
    """Return for each event which earlier send of the same rank and which earlier arrivals there a send waits for.

    A send needs the arrivals that write what it reads. Those that an earlier send of this rank has waited for are
    implied when it waits for that send. A gather never overwrites what is yet to be read: the block it brings is the
    sum of parts, the receiver's among them, which it has read before.
    """
    chosen: list[_Waits] = []
    known: list[set[int]] = []
    for now, event in enumerate(events):
        need = set()
        for then, past in enumerate(events[:now]):
            same = event.adds == past.adds
            # A gather returns sums; what is added to a sum that stays here is at position 0 of its circle.
            if _overlap(past, past.written, event, event.read) if same else 0 in past.written and 0 in event.read:
                need.add(then)
        own = max(range(now), key=lambda then: (len(known[then] & need), then), default=None)
        implied = set() if own is None else known[own]
        arrivals = need - implied
        if need <= arrivals.union(*(_implied_arrivals(events, then, chosen, known) for then in arrivals)):
            own, implied = None, set()
        chosen.append((own, arrivals))
        known.append(need | implied)
    return chosen


def _implied_arrivals(
    events: Sequence[_Event], then: int, chosen: Sequence[_Waits], known: Sequence[set[int]]
) -> set[int]:
    """Return the arrivals at a rank that the arrival of event ``then`` implies, because its sender waited for them."""
    own, arrivals = chosen[then]
    found: set[int] = set()
    if own is not None and events[own].goes == events[then].goes:
        found |= {own}
    for past in arrivals:
        if events[past].goes == events[then].comes:
            found |= known[past]
    return found


def exchange(
    name: str, operation: Operation, circles: Sequence[Circle], *, near_first: bool = True, paced: bool = False
) -> Plan:
    """Build a reduce-scatter on one circle after the other, the all-gather back, or both.

    Args:
        name: of the plan.
        operation: all_reduce, reduce_scatter or all_gather.
        circles: the data that is left shrinks by the factor ``size`` in each; N is the product of all sizes.
        near_first: the first circle, which moves the most, connects neighbouring ranks; else distant ones.
        paced: a rank begins a round when it has sent and received in the one before, even if the data would allow more.
    """
    sizes = [one.size for one in circles]
    ranks = math.prod(sizes)
    widths = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    apart = [math.prod(sizes[:i]) for i in range(len(sizes))] if near_first else widths
    everyone = np.arange(ranks)
    digits = [everyone // step % size for step, size in zip(apart, sizes, strict=True)]
    bases = [np.zeros(ranks, np.int64)]
    for digit, width in zip(digits, widths, strict=True):
        bases.append(bases[-1] + digit * width)
    owner = np.empty(ranks, np.int32)
    owner[bases[-1]] = everyone

    events = _events(circles, operation)
    shape = (len(events), ranks)
    target, base, head = np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(shape, np.int64)
    origin = np.empty(shape, np.int64)
    for row, event in enumerate(events):
        digit, size, step = digits[event.circle], sizes[event.circle], apart[event.circle]
        target[row] = everyone + ((digit + event.skip) % size - digit) * step
        origin[row] = everyone + ((digit - event.skip) % size - digit) * step
        base[row] = bases[event.circle]
        head[row] = (digit + event.read.start) % size * widths[event.circle]
    waiter, after = _dependencies(_paced_waits(events) if paced else _waits(events), origin)
    width = np.array([widths[event.circle] for event in events])
    return assembled(
        name,
        operation,
        ranks,
        ranks,
        np.tile(everyone, len(events)),
        target.reshape(-1),
        head.reshape(-1),
        waiter=waiter,
        after=after,
        owner=() if operation == "all_reduce" else owner,
        base=base.reshape(-1),
        count=np.repeat([len(event.read) for event in events] * width, ranks),
        modulus=np.repeat([sizes[event.circle] for event in events] * width, ranks),
        adds=np.repeat([int(event.adds) for event in events], ranks),
    )


def _paced_waits(events: Sequence[_Event]) -> list[_Waits]:
    return [(None, set()) if now == 0 else (now - 1, {now - 1}) for now in range(len(events))]


def _dependencies(waits: Sequence[_Waits], origin: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return waiters and what they wait for; ``origin`` (events, ranks) says from whom each rank receives."""
    ranks = origin.shape[1]
    everyone = np.arange(ranks)
    waiter, after = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for row, (own, arrivals) in enumerate(waits):
        mine = [] if own is None else [own * ranks + everyone]
        for awaited in [*mine, *(then * ranks + origin[then] for then in sorted(arrivals))]:
            waiter.append(row * ranks + everyone)
            after.append(awaited)
    return np.concatenate(waiter), np.concatenate(after)


def circulant(operation: Operation, ranks: int) -> Plan:
    """Exchange on one circle of all ranks: ⌈log2 N⌉ rounds each way and 2(N − 1)/N · S, for every N."""
    return exchange("circulant", operation, [circle(ranks)])


Nearness: TypeAlias = Literal["near", "far"]
"""Partners of the first exchange, which moves the most: neighbouring ranks, or distant ones."""


def halving_doubling(operation: Operation, ranks: int, *, first: Nearness = "near") -> Plan:
    """Exchange by recursive halving and doubling (Rabenseifner 2004; Thakur et al. 2005), ⌈log2 N⌉ rounds each way.

    N = 2^a · m with m odd: a exchanges of halves, rank r with r XOR 2^t, then one circle of m ranks. Published variants
    fold the ranks beyond a power of two onto others, which costs up to twice the bytes and two rounds. The circle costs
    nothing: 2(N − 1)/N · S and ⌈log2 N⌉ rounds each way hold for every N; see `foretrain.collective.circulant`.

    Args:
        operation: all_reduce, reduce_scatter or all_gather.
        ranks: N, at least 2.
        first: partners of the first exchange; MPI libraries begin far, EFLOPS near.
    """
    return exchange("halving_doubling", operation, halvings(ranks), near_first=first == "near")


def halvings(ranks: int) -> list[Circle]:
    """Return circles of two, and one of the odd factor."""
    twos = (ranks & -ranks).bit_length() - 1
    odd = ranks >> twos
    return [circle(2)] * twos + ([circle(odd)] if odd > 1 else [])
