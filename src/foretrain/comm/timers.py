"""A real clock and what is to be done when: the part of an engine's world that all its threads have in common."""

from __future__ import annotations

import time
from collections.abc import Callable
from heapq import heappop, heappush

from foretrain.units import NANOSECOND, SECOND, Time


class Timers:
    """For one thread.

    Args:
        origin: ns of the monotonic clock that count as 0.
    """

    def __init__(self, origin: int) -> None:
        self._origin = origin
        self._heap: list[tuple[Time, int, Callable[[], None]]] = []
        self._count = 0

    def now(self) -> Time:
        """Picoseconds since the origin."""
        return (time.perf_counter_ns() - self._origin) * NANOSECOND

    def call_at(self, when: Time, call: Callable[[], None]) -> None:
        """Has `run_due` call ``call`` from ``when`` on."""
        self._count += 1
        heappush(self._heap, (when, self._count, call))

    def run_due(self) -> None:
        """Calls what is due, the earliest first."""
        while self._heap and self._heap[0][0] <= self.now():
            heappop(self._heap)[2]()

    def seconds_left(self, most: float) -> float:
        """Until something is due, at most ``most``."""
        return min(most, max(0.0, (self._heap[0][0] - self.now()) / SECOND)) if self._heap else most
