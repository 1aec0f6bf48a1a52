"""Packet losses in the steps of a collective: drawn at random, or recorded by a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError
from foretrain.loss_tolerance.survival import check_chance

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
