"""The streams of one simulated GPU: queues of records, each executed when the stream gets there.

# Note [Positions]
A stream's *position* is when it is through with what it has executed. It may lie ahead of the world's time: what a
RECORD or WAIT comes to is known as soon as the stream is there, and waits for nothing. Only the end of a run (while
communication may still slow it down) and the start of a communication are things that happen in the world.

# Note [Fluid work]
A run of kernels begun at s, with work w and floor f, ends at max(s + w, f): the kernels wait now and then for the host
to launch them. It is taken as a fluid that begins to flow at b = max(s, f - w), which has the same end. While any
communication of the same GPU is under way, computing w takes w times the slowdown. Runs on several streams of a GPU do
not slow each other: a script that uses streams does so where kernels leave room for each other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from foretrain.live.story import Chapter
from foretrain.live.wire import COLLECTIVE, RECORD, RUN, WAIT
from foretrain.units import Time
from foretrain.virtual.world import TIMER, VirtualWorld

CALL: Final = COLLECTIVE
"""The item of a queue that is a rank's part in a communication."""


class Event:
    """Something that happens once. ``time`` is None until it is known when, which may be before.

    Attributes:
        meeting: the communication whose end it is, if it is one.
    """

    __slots__ = ("_waiters", "meeting", "time")

    def __init__(self, time: Time | None = None, meeting: Any = None) -> None:
        self.time = time
        self.meeting = meeting
        self._waiters: list[Callable[[], None]] | None = None

    def happen(self, time: Time) -> None:
        """Makes known that it happens at ``time``."""
        self.time = time
        waiters, self._waiters = self._waiters, None
        for wake in waiters or ():
            wake()

    def then(self, call: Callable[[], None]) -> None:
        """Calls once ``time`` is known."""
        if self.time is not None:
            call()
        elif self._waiters is None:
            self._waiters = [call]
        else:
            self._waiters.append(call)


class Call(Protocol):
    """A rank's part in a communication, to which its stream comes."""

    host: Time

    def arrive(self, time: Time) -> None:
        """The stream is there; it stands until `Stream.resume`."""
        ...

    def missing(self) -> list[int]:
        """The live ranks it waits for."""
        ...


class Pace:
    """How fast a GPU computes: slower by ``slowdown`` while any of its communications is under way."""

    __slots__ = ("_communications", "_slowdown", "running", "stretch")

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self._communications = 0
        self.stretch = 1.0
        self.running: list[Stream] = []

    @property
    def varies(self) -> bool:
        """Whether communication slows computing at all."""
        return self._slowdown > 1

    def communication(self, change: int) -> None:
        """One communication begins (+1) or ends (-1) now."""
        self._communications += change
        stretch = self._slowdown if self._communications else 1.0
        if stretch != self.stretch:
            self.stretch = stretch
            for stream in self.running:
                stream.repace()


class Stream:
    """One stream.

    Attributes:
        queue: a RUN as it came, ``(RECORD, event, host)``, ``(WAIT, event)`` or ``(CALL, call)``.
        position: see Note [Positions].
        blocked: what it stands at: an event, a call, or itself while a run is under way; None if it does not.
    """

    __slots__ = (
        "_begin",
        "_chapter",
        "_left",
        "_pace",
        "_reached",
        "_run",
        "_since",
        "_stretch",
        "_version",
        "_world",
        "blocked",
        "number",
        "position",
        "queue",
    )

    def __init__(self, number: int, world: VirtualWorld, pace: Pace, chapter: Chapter) -> None:
        self.number = number
        self.position: Time = 0
        self.queue: deque[tuple[Any, ...]] = deque()
        self.blocked: Event | Call | Stream | None = None
        self._world, self._pace, self._chapter = world, pace, chapter
        self._version = 0

    def advance(self) -> None:
        """Executes what can be executed."""
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
                call: Call = item[1]
                self.blocked = call
                call.arrive(self.position if self.position > call.host else call.host)
                return

    def resume(self, time: Time) -> None:
        """What it stood at is over since ``time``."""
        self.blocked = None
        if time > self.position:
            self.position = time
        self.advance()

    def tail(self) -> Event:
        """The event that all that is now in the queue is done."""
        if self.blocked is None:
            return Event(self.position)
        if not self.queue or self.queue[-1][0] != RECORD:
            self.queue.append((RECORD, Event(), 0))
        return self.queue[-1][1]

    def _waited(self) -> None:
        event = self.blocked
        assert isinstance(event, Event)
        assert event.time is not None
        self.resume(event.time)

    def _begin_run(self, item: tuple[Any, ...]) -> bool:
        """Whether the stream now stands until the run ends."""
        work: Time = item[4]
        reached = self.position
        begin = item[5] - work
        if begin < reached:
            begin = reached
        end = begin + work
        if not work or not self._pace.varies:
            self.position = end
            self._chapter.ran(self.number, reached, begin, end, item)
            return False
        now = self._world.now()
        if begin < now:
            raise late(self._chapter.rank, "kernels", begin, now)
        self._reached, self._begin, self._since, self._left, self._run = reached, begin, begin, work, item
        self._pace.running.append(self)
        self.blocked = self
        self._schedule_end()
        return True

    def repace(self) -> None:
        """Goes on with the run under way at the pace that the GPU now has."""
        now = self._world.now()
        if now > self._since:
            self._left -= int((now - self._since) / self._stretch)
            self._since = now
        self._schedule_end()

    def _schedule_end(self) -> None:
        self._stretch = stretch = self._pace.stretch
        self._version += 1
        left = self._left if stretch == 1 else math.ceil(self._left * stretch)
        self._world.schedule(self._since + left, TIMER, self._end_run, self._version)

    def _end_run(self, version: int) -> None:
        if version == self._version:  # Otherwise the pace has changed in between.
            self._pace.running.remove(self)
            self.position = end = self._world.now()
            self._chapter.ran(self.number, self._reached, self._begin, end, self._run)
            self.blocked = None
            self.advance()

    def under_way(self) -> Time | None:
        """When the run under way began to flow, if there is one."""
        return self._begin if self.blocked is self else None


def late(rank: int, what: str, when: Time, now: Time) -> AssertionError:
    """The error of a log that breaks Note [Conservative time]: our own bug, not the script's."""
    return AssertionError(f"rank {rank} sent {what} of {when} ps when its clock had been {now} ps or later before")
