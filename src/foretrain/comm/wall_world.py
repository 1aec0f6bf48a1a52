"""The wall world: the same engine and policies as in the virtual one, on a real clock.

One thread runs every callback, so that an engine needs no lock; one more paces the pipe, a link that carries one chunk
at a time for as long as it would take. It is the smallest world with real concurrency: what a policy decides in it must
be what it decides in the virtual one. `foretrain.comm.coordinator.coordinator` is the world of a real job, with
torch.distributed in the pipe's place.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from heapq import heappop, heappush
from queue import SimpleQueue
from types import TracebackType

from foretrain.errors import ForetrainError
from foretrain.network.route import Hop
from foretrain.tasks import Chunk
from foretrain.units import Time

_NANOSECOND: Time = 1000


class WallWorld:
    """A real clock and one paced pipe. Use as a context manager: it owns two threads.

    Args:
        hop: the pipe: cost per byte, overhead and latency.

    ``with WallWorld(hop) as world: ...`` starts the threads; leaving ends them, also on an exception or Ctrl-C,
    whatever is still under way. What either thread raises ends both; `run_until` raises it again, a ForetrainError as
    it is and anything else wrapped in one.
    """

    def __init__(self, hop: Hop) -> None:
        self._hop = hop
        self._origin = time.perf_counter_ns()
        self._changed = threading.Condition()
        self._timers: list[tuple[Time, int, Callable[[], None]]] = []
        self._sequence = 0
        self._closed = False
        self._failure: BaseException | None = None
        self._chunks: SimpleQueue[tuple[Chunk, Callable[[Chunk], None]] | None] = SimpleQueue()
        self._stop = threading.Event()
        self._threads = (
            threading.Thread(target=self._guard, args=(self._loop,), name="foretrain-wall-loop", daemon=True),
            threading.Thread(target=self._guard, args=(self._pace,), name="foretrain-wall-pipe", daemon=True),
        )

    def __enter__(self) -> WallWorld:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._stop.set()
        self._chunks.put(None)
        for thread in self._threads:
            thread.join()

    def now(self) -> Time:
        """Picoseconds since this world was made."""
        return (time.perf_counter_ns() - self._origin) * _NANOSECOND

    def call_at(self, when: Time, call: Callable[[], None]) -> None:
        """Runs ``call`` on the loop's thread at ``when`` or as soon as possible after it. Any thread may call this."""
        with self._changed:
            self._sequence += 1
            heappush(self._timers, (when, self._sequence, call))
            self._changed.notify_all()

    def start(self, chunk: Chunk, done: Callable[[Chunk], None]) -> None:
        """Queues ``chunk`` at the pipe; ``done(chunk)`` runs on the loop's thread when it has arrived."""
        self._chunks.put((chunk, done))

    def run_until(self, finished: threading.Event, timeout: float) -> None:
        """Waits for ``finished``, at most ``timeout`` seconds; raises what a callback raised, or TimeoutError."""
        deadline = time.monotonic() + timeout
        while not finished.wait(0.02):
            if self._failure is not None:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"the wall world did not finish within {timeout} s")
        if isinstance(self._failure, ForetrainError):
            raise self._failure
        if self._failure is not None:
            raise ForetrainError(f"the wall world failed: {self._failure!r}") from self._failure

    def _guard(self, body: Callable[[], None]) -> None:
        """Runs a thread's body and keeps what it raises."""
        try:
            body()
        except BaseException as error:
            self._failure = self._failure or error

    def _seconds_until(self, when: Time) -> float:
        """At most an hour: what waits looks again, and no wait is longer than the system can express."""
        return min(3600.0, (when - self.now()) / 1e12)

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._timers or self._timers[0][0] > self.now()):
                    wait = self._seconds_until(self._timers[0][0]) if self._timers else None
                    self._changed.wait(wait)
                if self._closed:
                    return
                call = heappop(self._timers)[2]
            call()

    def _pace(self) -> None:
        free: Time = 0
        while (item := self._chunks.get()) is not None:
            chunk, done = item
            # Against the absolute end of the last chunk, so that late wake-ups do not add up.
            free = max(free, self.now()) + self._hop.occupancy(chunk.size)
            while (left := self._seconds_until(free)) > 0:
                if self._stop.wait(left):
                    return
            self.call_at(free + self._hop.latency, lambda chunk=chunk, done=done: done(chunk))
