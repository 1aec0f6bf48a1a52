"""Parts of an event loop that owns a thread: a clock with timers, an inbox for other threads, a detector of lost peers.

`Coordinator`, `Heartbeat` and a worker's exchange with parameter servers each run such a loop:

    inbox.sleep(most) → select or poll → inbox.awake() → inbox items → timers.run_due() → detector.tick()
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Any

from foretrain.units import NANOSECOND, SECOND, Time

FAILURE_GRACE = 2.0
"""Seconds that a failed collective waits for the links to name the rank that failed."""
POLL_INTERVAL = 1.0
"""Seconds between two checks of a thread that waits for a collective. When Python ends, a thread must not be inside of
gloo for longer, either."""


class Timers:
    """Real clock and pending timers of one thread.

    Args:
        origin: ns of the monotonic clock that count as 0.
    """

    def __init__(self, origin: int) -> None:
        self._origin = origin
        self._heap: list[tuple[Time, int, Callable[[], None]]] = []
        self._count = 0

    def now(self) -> Time:
        """Return the picoseconds since the origin."""
        return (time.perf_counter_ns() - self._origin) * NANOSECOND

    def call_at(self, when: Time, call: Callable[[], None]) -> None:
        """Make `run_due` call ``call`` once it is ``when``."""
        self._count += 1
        heappush(self._heap, (when, self._count, call))

    def run_due(self) -> None:
        """Call everything that is due, the earliest first."""
        while self._heap and self._heap[0][0] <= self.now():
            heappop(self._heap)[2]()

    def seconds_left(self, most: float) -> float:
        """Return the seconds until the next timer is due, at most ``most``."""
        return min(most, max(0.0, (self._heap[0][0] - self.now()) / SECOND)) if self._heap else most


class Inbox:
    """Queue from any thread to the one that owns it; wakes the owner by a socket, and only while it sleeps.

    The owner selects on `fileno`. It announces its sleep before it looks for items, and others append before they look
    whether it sleeps, so that no item is missed.
    """

    def __init__(self) -> None:
        self._items: deque[tuple[Any, ...]] = deque()
        self._sleeping = False
        self._waker, self._socket = socket.socketpair()
        self._waker.setblocking(False)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when another thread wakes the owner."""
        return self._socket.fileno()

    @property
    def filled(self) -> bool:
        """Return whether there are items."""
        return bool(self._items)

    def append(self, *item: Any) -> None:
        """Add ``item`` and let the owner sleep on."""
        self._items.append(item)

    def post(self, *item: Any) -> None:
        """Add ``item`` and wake the owner."""
        self._items.append(item)
        self.wake()

    def wake(self) -> None:
        """Wake the owner if it sleeps."""
        if self._sleeping:
            self._sleeping = False
            with contextlib.suppress(OSError):
                self._waker.send(b"!")

    def sleep(self, most: float) -> float:
        """Announce the owner's sleep; return how many seconds it may sleep: 0 if there are items, else ``most``."""
        self._sleeping = True
        return 0.0 if self._items else most

    def awake(self) -> None:
        """End the announced sleep."""
        self._sleeping = False

    def clear_wakeups(self) -> None:
        """Read what made `fileno` readable."""
        with contextlib.suppress(BlockingIOError):
            self._socket.recv(4096)

    def drain(self) -> Iterator[tuple[Any, ...]]:
        """Yield and remove the items, with those that are added meanwhile."""
        while self._items:
            yield self._items.popleft()

    def close(self) -> None:
        """Close the sockets; `post` then wakes no thread."""
        self._waker.close()
        self._socket.close()


class SilenceDetector:
    """Measures how long peers have been silent, counting only while the measuring thread was awake itself.

    A process that was stopped or starved, or whose machine was paused, finds on waking that its peers have sent nothing
    for a while: it did not listen, and they may have slept as long. Silence counts from then on only. A thread that
    keeps missing its own deadline reports no peer as lost; a peer that is gone then shows by a broken link.

    Args:
        allowed: seconds that peers may be silent. A listening thread calls `tick` in far less than a quarter of it.
    """

    def __init__(self, allowed: float) -> None:
        self._allowed = allowed
        self._since = self._latest = time.monotonic()

    def tick(self) -> float:
        """Note that the thread is awake and has just read its links; return the time in seconds. Call in each turn."""
        now = time.monotonic()
        if now - self._latest > self._allowed / 4:
            self._since = now
        self._latest = now
        return now

    def exceeded(self, heard: float) -> float | None:
        """Return the seconds of silence of a peer last heard at ``heard`` if they are more than allowed, else None."""
        silent = self._latest - max(heard, self._since)
        return silent if silent > self._allowed else None
