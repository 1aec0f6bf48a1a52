"""Streams of one simulated GPU: queues of records, executed in order.

# Note [Positions]
A stream's *position* is the end of what it has executed. It may lie ahead of the world's time: what a
RECORD or WAIT comes to is known as soon as the stream is there, and waits for nothing. Only the end of a run (while
communication may still slow it down) and the start of a communication are things that happen in the world.

# Note [Fluid work]
A run of kernels begun at s, with work w and floor f, ends at max(s + w, f): the kernels wait now and then for the host
to launch them. It is taken as a fluid that begins to flow at b = max(s, f - w), which has the same end. While any
communication of the same GPU is under way, computing w takes w times the slowdown.

Runs that flow at once share the GPU's multiprocessors equally, so that two take as long side by side as one behind the
other: processor sharing. A run's *demand* is the part of its work that needs multiprocessors; copies between host and
GPU have engines of their own. With the sum of demands D > 1, a run of demand d takes 1 + d (D - 1) times as long.
Kernels too small to fill a GPU would leave room for others; what a kernel leaves is not known, and not modelled.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from foretrain.live.event_log import COLLECTIVE, RECORD, RUN, WAIT
from foretrain.live.rank_trace import RankTrace
from foretrain.simulation.world import TIMER, VirtualWorld
from foretrain.units import Time

CALL: Final = COLLECTIVE
"""Kind of the queue's items that are communications of the rank."""


class StreamEvent:
    """Event that happens once. ``time`` may be known in advance, and is None until then.

    Attributes:
        comm: the communication whose end it is, if it is one.
    """

    __slots__ = ("_waiters", "comm", "time")

    def __init__(self, time: Time | None = None, comm: Any = None) -> None:
        self.time = time
        self.comm = comm
        self._waiters: list[Callable[[], None]] | None = None

    def happen(self, time: Time) -> None:
        """Make known that it happens at ``time``."""
        self.time = time
        waiters, self._waiters = self._waiters, None
        for wake in waiters or ():
            wake()

    def then(self, call: Callable[[], None]) -> None:
        """Call once ``time`` is known."""
        if self.time is not None:
            call()
        elif self._waiters is None:
            self._waiters = [call]
        else:
            self._waiters.append(call)


class CommCall(Protocol):
    """Communication of a rank, in the queue of its stream."""

    host: Time

    def arrive(self, time: Time) -> None:
        """Mark the stream as arrived; it waits until `Stream.resume`."""
        ...

    def missing(self) -> list[int]:
        """Return the live ranks it waits for."""
        ...


class SmShare:
    """Compute speed of a GPU: see Note [Fluid work].

    Args:
        world: the virtual clock.
        slowdown: how much longer computing takes while any of the GPU's communications is under way, 1 or more.
    """

    __slots__ = ("_communications", "_slowdown", "_world", "running")

    def __init__(self, world: VirtualWorld, slowdown: float) -> None:
        self._world = world
        self._slowdown = slowdown
        self._communications = 0
        self.running: list[Stream] = []

    def communication(self, change: int) -> None:
        """Count one communication that begins (+1) or ends (-1) now."""
        before = bool(self._communications)
        self._communications += change
        if before != bool(self._communications):
            self.share()

    def begin(self, stream: Stream) -> None:
        """Add the run of ``stream``, which may flow only later."""
        self.running.append(stream)
        if len(self.running) > 1:
            for each in self.running:
                each.announce()
        self.share()

    def end(self, stream: Stream) -> None:
        """Remove the run of ``stream``, which is over."""
        self.running.remove(stream)
        if self.running:
            self.share()

    def share(self) -> None:
        """Set the speed of every run from now on."""
        stretch = self._slowdown if self._communications else 1.0
        if len(self.running) == 1:
            self.running[0].repace(stretch)
            return
        now = self._world.now()
        demand = sum(stream.demand for stream in self.running if stream.flows(now))
        for stream in self.running:
            stream.repace(stretch * (1 + stream.demand * (demand - 1)) if demand > 1 else stretch)


class SmShares:
    """Compute speeds of one rank's GPUs: most ranks have one, and a process may use several.

    Args:
        world, slowdown: as of `SmShare`.
    """

    def __init__(self, world: VirtualWorld, slowdown: float) -> None:
        self._world, self._slowdown = world, slowdown
        self._of: dict[int, SmShare] = {}

    def of(self, stream: int) -> SmShare:
        """Return the compute speed of the GPU of stream number ``stream``."""
        device = device_of(stream)
        pace = self._of.get(device)
        if pace is None:
            pace = self._of[device] = SmShare(self._world, self._slowdown)
        return pace

    def running(self) -> list[Stream]:
        """Return the streams that have a run to execute."""
        return [stream for pace in self._of.values() for stream in pace.running]


def device_of(stream: int) -> int:
    """Return the index of the GPU of stream number ``stream``."""
    return stream >> 16


class Stream:
    """CUDA stream of a simulated GPU.

    Attributes:
        queue: a RUN as it came, ``(RECORD, event, host)``, ``(WAIT, event)`` or ``(CALL, call)``.
        position: see Note [Positions].
        blocked: what it waits for: an event, a call, or itself while a run is under way; None if nothing.
        demand: the part of the run under way that needs multiprocessors, 0 to 1.
    """

    def __init__(self, number: int, world: VirtualWorld, pace: SmShare, rank_trace: RankTrace) -> None:
        self.number = number
        self.position: Time = 0
        self.queue: deque[tuple[Any, ...]] = deque()
        self.blocked: StreamEvent | CommCall | Stream | None = None
        self._world, self._pace, self._rank_trace = world, pace, rank_trace
        self._version = 0
        self._stretch = 0.0
        self.demand = 1.0

    def advance(self) -> None:
        """Execute what can be executed."""
        queue = self.queue
        while queue:
            item = queue.popleft()
            kind = item[0]
            if kind == RUN:
                if self._begin_run(item):
                    return
            elif kind == RECORD:
                if item[2] > self.position:
                    self.position = item[2]
                item[1].happen(self.position)
            elif kind == WAIT:
                time = item[1].time
                if time is None:
                    self.blocked = item[1]
                    item[1].then(self._waited)
                    return
                if time > self.position:
                    self.position = time
            else:
                call: CommCall = item[1]
                self.blocked = call
                call.arrive(self.position if self.position > call.host else call.host)
                return

    def resume(self, time: Time) -> None:
        """Go on after what the stream waited for, which ended at ``time``."""
        self.blocked = None
        if time > self.position:
            self.position = time
        self.advance()

    def tail(self) -> StreamEvent:
        """Return the event that everything in the queue has been executed."""
        if self.blocked is None:
            return StreamEvent(self.position)
        if not self.queue or self.queue[-1][0] != RECORD:
            self.queue.append((RECORD, StreamEvent(), 0))
        return self.queue[-1][1]

    def _waited(self) -> None:
        event = self.blocked
        assert isinstance(event, StreamEvent)
        assert event.time is not None
        self.resume(event.time)

    def _begin_run(self, item: tuple[Any, ...]) -> bool:
        """Begin a run; return whether the stream now stands until it ends."""
        work: Time = item[4]
        reached = self.position
        begin = item[5] - work
        if begin < reached:
            begin = reached
        if not work:
            self.position = begin
            self._rank_trace.ran(self.number, reached, begin, begin, item)
            return False
        now = self._world.now()
        if begin < now:
            raise late(self._rank_trace.rank, "kernels", begin, now)
        self._reached, self._begin, self._since, self._left, self._run = reached, begin, begin, work, item
        self.demand = 1 - item[6] / work if item[6] else 1.0
        self._stretch, self._announced = 0.0, False
        self.blocked = self
        self._pace.begin(self)
        return True

    def flows(self, now: Time) -> bool:
        """Return whether the run under way has begun to flow."""
        return self._begin <= now

    def announce(self) -> None:
        """Recompute the GPU's shares when the run under way begins to flow, if that is later."""
        if not self._announced and self._begin > self._world.now():
            self._announced = True
            self._world.schedule(self._begin, TIMER, self._pace.share)

    def repace(self, stretch: float) -> None:
        """Go on with the run under way, ``stretch`` times as long as alone."""
        if stretch == self._stretch:
            return
        now = self._world.now()
        if now > self._since:
            self._left -= int((now - self._since) / self._stretch)
            self._since = now
        self._stretch = stretch
        self._version += 1
        left = self._left if stretch == 1 else math.ceil(self._left * stretch)
        self._world.schedule(self._since + left, TIMER, self._end_run, self._version)

    def _end_run(self, version: int) -> None:
        if version == self._version:  # Otherwise the pace has changed in between.
            self.position = end = self._world.now()
            self._rank_trace.ran(self.number, self._reached, self._begin, end, self._run)
            self.blocked = None
            self._pace.end(self)
            self.advance()

    def under_way(self) -> Time | None:
        """Return when the run under way began to flow, if there is one."""
        return self._begin if self.blocked is self else None


def late(rank: int, what: str, when: Time, now: Time) -> AssertionError:
    """Return the error of a log that breaks Note [Conservative time]: our own bug, not the script's."""
    return AssertionError(f"rank {rank} sent {what} of {when} ps when its clock had been {now} ps or later before")
