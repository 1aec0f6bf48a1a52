"""Packet losses in the steps of a collective: drawn at random, or recorded by a simulation.

# Note [Survival]
The average share of contributions that arrives over the hops of a collective (`surviving`). Each hop
loses a packet with probability p, independently; a lost gradient counts as zero and nothing is rescaled (DLCP,
arXiv 2008.08445). With N ranks:

    reduce-scatter (and all-gather)     transpose          1 − p·(N − 1)/N
                                        ring               (1 − (1−p)^N) / (N·p)
                                        halving-doubling   (1 − p/2)^log2 N
    push (and pull)                     parameter server    1 − p

Why. A rank's own part of a block crosses no hop, and the others' one, where each rank sums a block (transpose); in the
ring they cross 1, 2, … N − 1 of them, so that the mean is that of (1−p)^h over h = 0 … N − 1. In halving-doubling a
part crosses a hop for each binary digit in which its rank and the block's owner differ, which is any digit for half of
all pairs. All-gather takes the same ways backwards, and what it loses does not depend on what was lost before, so an
all-reduce has the product of both. Derived here; the paper measures. `foretrain.loss_tolerance.execution` has the same
for every plan, without a formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, get_args, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError, unknown

Way: TypeAlias = Literal["transpose", "ring", "halving_doubling", "parameter_server"]
"""Exchange of gradients. By "transpose" each rank sums one block, as a server for all others; see `BoundedLoss`."""


def transpose(p: float, ranks: int) -> float:
    """Return the share of a reduce-scatter, or all-gather, over one hop, which a rank's own part does not cross."""
    return 1 - p * (ranks - 1) / ranks


def ring(p: float, ranks: int) -> float:
    """Return the share of a reduce-scatter, or all-gather, around a ring."""
    if p == 0:
        return 1.0
    # 1 − (1−p)^N without cancellation for the small p that matter.
    return 1 / ranks if p == 1 else -math.expm1(ranks * math.log1p(-p)) / (ranks * p)


def halving_doubling(p: float, ranks: int) -> float:
    """Return the share of a reduce-scatter, or all-gather, by halving or doubling.

    Raises:
        ConfigError: ``ranks`` is no power of two; the plan for other numbers has a circle besides, and its own mean.
    """
    if ranks & (ranks - 1):
        remedy = "take a power of two, or foretrain.loss_tolerance.execution.surviving for any plan"
        raise ConfigError("ranks", ranks, "has no closed form by halving and doubling", remedy)
    return (1 - p / 2) ** (ranks.bit_length() - 1)


def parameter_server(p: float, ranks: int) -> float:
    """Return the share of a push, or pull, over one hop, however many ranks there are."""
    return 1 - p


_HALVES: dict[Way, Callable[[float, int], float]] = {
    "transpose": transpose,
    "ring": ring,
    "halving_doubling": halving_doubling,
    "parameter_server": parameter_server,
}


def surviving(way: Way, p: float, ranks: int, *, halves: int = 2) -> float:
    """The mean share of a contribution that every rank ends with.

    >>> round(surviving("ring", 0.01, 8, halves=1), 3), round(surviving("ring", 0.01, 64, halves=1), 3)
    (0.966, 0.741)

    Args:
        way: of `Way`.
        p: of a hop, 0 to 1.
        ranks: N, at least 1; servers are not counted.
        halves: 1 for reduce-scatter or push alone, 2 for all-reduce or push and pull.

    Raises:
        ConfigError: a number is impossible, or there is no closed form.
    """
    if way not in _HALVES:
        raise unknown("way", way, get_args(Way))
    check_chance("p", p)
    if ranks < 1:
        raise ConfigError("ranks", ranks, "is below 1", "write e.g. 8")
    return _HALVES[way](p, ranks) ** halves


def budget(way: Way, total: float, ranks: int, *, halves: int = 2) -> float:
    """The p of a hop at which the collective as a whole loses the share ``total`` of every contribution on average.

    For a ring's reduce-scatter about 2·total / (N − 1), so p is to be accounted at the collective, not at the flow. (A
    budget of total / (N − 1) bounds the part that comes furthest as well.) Found by bisection, to the last bit.

    Args:
        way, ranks, halves: as `surviving` has them.
        total: 0 to below what is lost at p = 1.

    Raises:
        ConfigError: so much cannot be lost, since every rank has its own part for nothing.
    """
    most = 1 - surviving(way, 1.0, ranks, halves=halves)
    if not 0 <= total < max(most, math.ulp(0.0)):
        raise ConfigError("total", total, f"is not within 0 and {most:.4g}, which {way} loses at p = 1", "lower it")
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        if 1 - surviving(way, middle, ranks, halves=halves) <= total:
            low = middle
        else:
            high = middle
    return low


def check_chance(field: str, value: float) -> None:
    """ConfigError unless ``value`` is a probability."""
    if not 0 <= value <= 1:
        raise ConfigError(field, value, "is no probability", "write 0 to 1, e.g. 0.035 for 3.5 %")


_Key: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Tagged:
    """Tagged packets of one step of one transfer; columns are (packets,).

    They are in order, message by message and byte by byte.

    Attributes:
        message: int32, which tensor a packet is of. A packet is of one alone.
        size: int32, bytes of payload.
        queue: int8, the class that a host would tag it with; 0 goes first.
        droppable: bool, whether a switch may drop it while it keeps others.
    """

    message: NDArray[np.int32]
    size: NDArray[np.int32]
    queue: NDArray[np.int8]
    droppable: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.message)


Tags: TypeAlias = Mapping[tuple[int, int], Tagged]
"""The packets of every step, by transfer and step."""


class LossPattern(Protocol):
    """Losses of packets in one run of a collective.

    Asked once for every step of every transfer, in the order of `foretrain.loss_tolerance.execution.script`.
    """

    def lost(self, transfer: int, step: int, packets: Tagged) -> NDArray[np.bool_]:
        """Return which of ``packets`` never arrived, bool (packets,)."""
        ...


@runtime_checkable
class LookaheadLosses(LossPattern, Protocol):
    """A loss pattern that depends on what is droppable of the whole collective, as a network's does."""

    def foresee(self, tags: Tags) -> None:
        """Told before a run how its packets would be tagged if none were lost, by transfer and step, in order."""
        ...


class Random:
    """Independent losses of packets. With the same seed, what is lost at a low p is lost at every higher one too."""

    def __init__(self, p: float, seed: int | Sequence[int] = 0, *, important: float | None = None) -> None:
        """Loses droppable packets with probability ``p`` and all others with ``important``, the same by default."""
        self._droppable, self._important = p, p if important is None else important
        for field, value in (("p", self._droppable), ("important", self._important)):
            check_chance(field, value)
        self._draw = np.random.default_rng(seed)

    def lost(self, transfer: int, step: int, packets: Tagged) -> NDArray[np.bool_]:
        """See `LossPattern`."""
        drawn = self._draw.random(len(packets))
        return drawn < np.where(packets.droppable, self._droppable, self._important)


class Bursty:
    """Losses of packets in runs (Gilbert, 1960): all while the link is bad, none while it is good.

    A run has ``burst`` packets on average, and a share ``p`` is lost in the long run. Each step finds the wire in
    either state with the chances of the long run. Whether a packet is droppable makes no difference; see `Protected`.
    """

    def __init__(self, p: float, burst: float, seed: int | Sequence[int] = 0) -> None:
        check_chance("p", p)
        if burst < 1:
            raise ConfigError("burst", burst, "is below one packet", "write e.g. 8")
        if 0 < p < 1 and p / (burst * (1 - p)) > 1:
            raise ConfigError(
                "burst", burst, f"is too short for a loss of {p:.0%}", f"write at least {p / (1 - p):.3g}"
            )
        self._p, self._burst = p, burst
        self._draw = np.random.default_rng(seed)

    def lost(self, transfer: int, step: int, packets: Tagged) -> NDArray[np.bool_]:
        """See `LossPattern`."""
        count = len(packets)
        if self._p in (0, 1):
            return np.full(count, self._p == 1)
        leaves = 1 / self._burst, self._p / (self._burst * (1 - self._p))
        bad = bool(self._draw.random() < self._p)
        # Runs alternate; so many of both kinds, none shorter than a packet, are always enough.
        kinds = np.arange(count) % 2 == (0 if bad else 1)
        runs = self._draw.geometric(np.where(kinds, leaves[0], leaves[1]))
        return np.repeat(kinds, np.minimum(runs, count))[:count]


class OnLinks:
    """Independent losses on each link of a transfer's path; a grey failure is a rate of one link."""

    def __init__(
        self, paths: Sequence[Sequence[int]], rates: Mapping[int, float], seed: int | Sequence[int] = 0
    ) -> None:
        """``paths`` has the links of each transfer, ``rates`` the probability of each link that loses anything."""
        for link, rate in rates.items():
            check_chance(f"rates[{link}]", rate)
        self._p = [1 - float(np.prod([1 - rates.get(int(link), 0.0) for link in path])) for path in paths]
        self._draw = np.random.default_rng(seed)

    def lost(self, transfer: int, step: int, packets: Tagged) -> NDArray[np.bool_]:
        """See `LossPattern`."""
        if transfer >= len(self._p):
            raise ConfigError("paths", len(self._p), f"lack transfer {transfer}", "give the links of every transfer")
        return self._draw.random(len(packets)) < self._p[transfer]


class Protected:
    """Losses of another pattern, without those of packets that may not be dropped."""

    def __init__(self, losses: LossPattern) -> None:
        self._losses = losses

    def lost(self, transfer: int, step: int, packets: Tagged) -> NDArray[np.bool_]:
        """See `LossPattern`."""
        return self._losses.lost(transfer, step, packets) & packets.droppable


class RecordedLosses:
    """Losses that a simulation or a real network recorded, by (message, transfer, step); the rest has arrived."""

    def __init__(self, lost: Mapping[_Key, NDArray[np.bool_]]) -> None:
        """``lost`` has a bool (packets of the message in the step,) each."""
        self._lost = {key: np.asarray(which, np.bool_) for key, which in lost.items() if np.any(which)}
        self._messages: dict[tuple[int, int], list[int]] = {}
        for message, transfer, step in sorted(self._lost):
            self._messages.setdefault((transfer, step), []).append(message)

    @classmethod
    def of_ranges(
        cls, ranges: Mapping[_Key, Sequence[tuple[int, int]]], sizes: Mapping[_Key, int], payload: int
    ) -> RecordedLosses:
        """Return losses from byte ranges [start, stop) of each step; a packet is lost if any of its bytes is.

        Args:
            ranges: by (message, transfer, step), sorted and disjoint.
            sizes: bytes of that message in that step, for the same keys.
            payload: bytes of a packet, but the last.
        """
        return cls({key: packets_in(found, sizes[key], payload) for key, found in ranges.items()})

    def lost(self, transfer: int, step: int, packets: Tagged) -> NDArray[np.bool_]:
        """See `LossPattern`. ConfigError where a record is not of so many packets as there are."""
        found = np.zeros(len(packets), np.bool_)
        for message in self._messages.get((transfer, step), ()):
            low, high = np.searchsorted(packets.message, [message, message + 1])
            which = self._lost[message, transfer, step]
            if len(which) != high - low:
                field = f"lost[message {message}, transfer {transfer}, step {step}]"
                problem = f"is not one for each of {high - low} packets"
                raise ConfigError(field, len(which), problem, "record with the same payload and padded sizes")
            found[low:high] = which
        return found


def packets_in(ranges: Sequence[tuple[int, int]], size: int, payload: int) -> NDArray[np.bool_]:
    """Return which packets of a message of ``size`` bytes byte ranges [start, stop) touch, bool (⌈size / payload⌉,)."""
    touched = np.zeros(-(-size // payload), np.bool_)
    for start, stop in ranges:
        if not 0 <= start < stop <= size:
            raise ConfigError("ranges", (start, stop), f"is not a range within {size} bytes", "give [start, stop)")
        touched[start // payload : -(-stop // payload)] = True
    return touched
