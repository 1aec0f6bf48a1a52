"""Virtual world of discrete events: time jumps from event to event.

The heap's key is (time, priority, sequence). At one instant arrivals come before timers, so that the owner of a timer
knows what has arrived; starts and looks come last, so that they see the whole instant. Events of one priority keep the
order in which they were scheduled.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Protocol

from foretrain.errors import StallError
from foretrain.tasks import Chunk
from foretrain.units import Time

ARRIVAL, TIMER, START, LOOK = 0, 1, 2, 3
_MOST_EVENTS = 1_000_000
"""Events at one instant after which time is taken to stand still."""
_FOREVER: Time = 1 << 62


class ChunkCarrier(Protocol):
    """Network in virtual time: carries chunks."""

    def carry(self, chunk: Chunk, world: VirtualWorld, done: Callable[[Chunk], None]) -> None:
        """Take ``chunk`` now and call ``done(chunk)`` through ``world.schedule`` when it has arrived."""
        ...


class VirtualWorld:
    """Event queue with a virtual clock and a network. Not thread-safe: one thread owns it.

    Args:
        carrier: moves the chunks; None where nobody sends any.
    """

    def __init__(self, carrier: ChunkCarrier | None = None) -> None:
        self._carrier = carrier
        self._now: Time = 0
        self._sequence = 0
        self._limit: tuple[Time, int] = (0, START)
        self._heap: list[tuple[Time, int, int, Callable[..., None], tuple[Any, ...]]] = []

    def now(self) -> Time:
        """Return the present time."""
        return self._now

    def call_at(self, when: Time, call: Callable[[], None]) -> None:
        """Run ``call`` at ``when``, or now if that is past."""
        self.schedule(when, TIMER, call)

    def start(self, chunk: Chunk, done: Callable[[Chunk], None]) -> None:
        """Hand ``chunk`` to the network."""
        assert self._carrier is not None, "a world without a carrier moves no chunks"
        self._carrier.carry(chunk, self, done)

    def schedule(self, when: Time, priority: int, call: Callable[..., None], *args: Any) -> None:
        """Run ``call(*args)`` at ``when``; at one instant the lower priority first, then first come, first served."""
        self._sequence += 1
        heappush(self._heap, (when if when > self._now else self._now, priority, self._sequence, call, args))

    def stop(self) -> None:
        """End `run` or `advance` after the present event."""
        self._limit = (-1, START)

    def run(self) -> None:
        """Run until no event is left, or `stop`; StallError if time no longer advances."""
        self.advance(_FOREVER)

    def advance(self, limit: Time) -> None:
        """Run all events before ``limit``, and those at ``limit`` that are arrivals or timers.

        Starts and looks at ``limit`` wait for the next call, because more may be scheduled for that instant: the result
        does not depend on the limits by which a world is advanced. Time stands at the last event.
        """
        heap, left = self._heap, _MOST_EVENTS
        self._limit = (limit, START)
        while heap and heap[0] < self._limit:
            when, _, _, call, args = heappop(heap)
            if when > self._now:
                self._now, left = when, _MOST_EVENTS
            left -= 1
            if not left:
                raise self._stands_still()
            call(*args)

    def hold(self, limit: Time) -> None:
        """Lower the limit of the `advance` under way."""
        if limit < self._limit[0]:
            self._limit = (limit, START)

    def _stands_still(self) -> StallError:
        waits = [f"{call.__qualname__} at {when} ps" for when, _, _, call, _ in self._heap[:12]]
        return StallError(f"time stands still at {self._now} ps after {_MOST_EVENTS:,} events there:", waits)
