"""The virtual world: time jumps from event to event.

The heap's key is (time, priority, sequence): among events of one instant arrivals come before timers, because what has
arrived is a fact that a timer's owner should know, and otherwise they keep the order in which they were asked for.
Starts and looks come last: what must be seen as a whole, in whichever order its parts came, waits for the rest of an
instant.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Protocol

from foretrain.errors import StallError
from foretrain.tasks import Chunk
from foretrain.units import Time

ARRIVAL, TIMER, START, LOOK = 0, 1, 2, 3
_PATIENCE = 1_000_000
"""Events at one instant after which time is taken to stand still."""


class ChunkCarrier(Protocol):
    """How a chunk crosses the network in virtual time; the seam behind which a network simulator stands."""

    def carry(self, chunk: Chunk, world: VirtualWorld, done: Callable[[Chunk], None]) -> None:
        """Takes ``chunk`` now and calls ``done(chunk)`` through ``world.schedule`` when it has arrived."""
        ...


class VirtualWorld:
    """A clock that jumps, and a network. Not thread-safe: one thread owns it.

    Args:
        carrier: moves the chunks; None where nobody sends any.
    """

    def __init__(self, carrier: ChunkCarrier | None = None) -> None:
        self._carrier = carrier
        self._now: Time = 0
        self._sequence = 0
        self._stopped = False
        self._limit: tuple[Time, int] = (0, START)
        self._heap: list[tuple[Time, int, int, Callable[..., None], tuple[Any, ...]]] = []

    def now(self) -> Time:
        """The present."""
        return self._now

    def call_at(self, when: Time, call: Callable[[], None]) -> None:
        """Runs ``call`` at ``when``, or now if that is past."""
        self.schedule(when, TIMER, call)

    def start(self, chunk: Chunk, done: Callable[[Chunk], None]) -> None:
        """Hands ``chunk`` to the network."""
        assert self._carrier is not None, "a world without a carrier moves no chunks"
        self._carrier.carry(chunk, self, done)

    def schedule(self, when: Time, priority: int, call: Callable[..., None], *args: Any) -> None:
        """Runs ``call(*args)`` at ``when``; among equals the lower priority first, then first come, first served."""
        self._sequence += 1
        heappush(self._heap, (when if when > self._now else self._now, priority, self._sequence, call, args))

    def stop(self) -> None:
        """Lets nothing more happen after what is happening now."""
        self._stopped = True

    def run(self) -> None:
        """Runs until nothing is left to happen, or `stop`; StallError if time no longer advances."""
        heap, patience = self._heap, _PATIENCE
        while heap and not self._stopped:
            when, _, _, call, args = heappop(heap)
            if when > self._now:
                self._now, patience = when, _PATIENCE
            patience -= 1
            if not patience:
                raise self._stands_still()
            call(*args)

    def advance(self, limit: Time) -> None:
        """Lets happen all that is due before ``limit``, and of what is due then the arrivals and timers.

        Starts and looks of that instant wait, because more may be asked for at ``limit``: to whoever advances a world
        bit by bit, what an instant brings must not depend on the bits. Time stands at the last event, not at ``limit``.
        """
        heap, patience = self._heap, _PATIENCE
        self._limit = (limit, START)
        while heap and heap[0] < self._limit:
            when, _, _, call, args = heappop(heap)
            if when > self._now:
                self._now, patience = when, _PATIENCE
            patience -= 1
            if not patience:
                raise self._stands_still()
            call(*args)

    def hold(self, limit: Time) -> None:
        """Lowers the limit of the `advance` under way."""
        if limit < self._limit[0]:
            self._limit = (limit, START)

    def _stands_still(self) -> StallError:
        waits = [f"{call.__qualname__} at {when} ps" for when, _, _, call, _ in self._heap[:12]]
        return StallError(f"time stands still at {self._now} ps after {_PATIENCE:,} events there:", waits)
