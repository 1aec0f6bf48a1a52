"""Bytes in flight to and from servers: unacknowledged chunks, outstanding sums, and state transfers.

Credit returns with the acknowledgement and not with the sum. Workers need not push in the same order: two whose windows
were full of ranges that the other has yet to push would wait for ever.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

from foretrain.comm.ps import wire
from foretrain.comm.ps.frames import Header
from foretrain.comm.ps.placement import ShardPart
from foretrain.comm.ps.wire import numbers
from foretrain.tasks import Chunk


class InFlightChunk:
    """Chunk that is being pushed; ``done(chunk)`` is called when ``left`` is 0."""

    __slots__ = ("chunk", "done", "issued", "left")

    def __init__(self, chunk: Chunk, done: Callable[[Chunk], None], left: int, issued: int) -> None:
        self.chunk, self.done, self.left, self.issued = chunk, done, left, issued


class ByteRange(NamedTuple):
    """Bytes ``[start, end)`` of a task, and the chunk that they were pushed in."""

    start: int
    end: int
    flight: InFlightChunk


class Arrived(NamedTuple):
    """Effects of an arrival: ``new`` ranges of the task, pulls that are complete, whether the task has landed."""

    new: list[tuple[int, int]]
    pulled: list[InFlightChunk]
    landed: bool


class InFlight:
    """Bytes in flight of tasks of these ``sizes``, in C++ (inflight.h); each byte is pushed, and returns, once a round.

    Servers answer bytes as the last worker has pushed them, so that sums are cut otherwise than pushes. Duplicates,
    as after a connection broke, count once. A `foretrain.comm.ps.wire.Wire` takes acknowledgements itself, and with
    `place` sums.

    Attributes:
        native: handle for that wire.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._library, self._tasks = wire.libraries()[1], len(sizes)
        self.native = self._library.foretrain_inflight_new(numbers(sizes), len(sizes))
        # Not at exit: the exchange's thread may run longer than other hooks there.
        weakref.finalize(self, self._library.foretrain_inflight_delete, self.native).atexit = False
        self._flights: dict[int, InFlightChunk] = {}
        """Chunks of this round, by the number that C++ knows."""
        self._unfinished = 0
        """Chunks of this round that nobody was told to be finished."""
        self._counts = numbers([0, 0])

    def split(self, parts: Iterable[ShardPart]) -> None:
        """Tell wires which parts there are, in order."""
        flat = [number for part in parts for number in (part.task, part.offset, part.size, part.shard)]
        self._library.foretrain_inflight_split(self.native, numbers(flat), len(flat) // 4)

    def place(self, places: Sequence[int]) -> None:
        """Let wires write sums to the addresses in ``places``, by task."""
        self._library.foretrain_inflight_place(self.native, numbers(places), len(places))

    def begin(self, step: int) -> None:
        """Begin round ``step``, when all sums of the one before have arrived; wires take no sums of others."""
        self._flights.clear()
        self._library.foretrain_inflight_begin(self.native, step)

    @property
    def idle(self) -> bool:
        """Return whether all chunks of the round are finished, and their owner knows it."""
        return not self._unfinished

    @property
    def moved(self) -> float:
        """Return when a wire took an answer last: s, monotonic clock."""
        return self._library.foretrain_inflight_moved(self.native) / 1e9

    @property
    def together(self) -> bool:
        """Return whether a wire has taken a sum of this round."""
        return bool(self._library.foretrain_inflight_together(self.native))

    def push(self, flight: InFlightChunk, task: int, start: int, end: int) -> None:
        """Note that these bytes of ``flight`` are pushed."""
        self._add(flight, task, start, end, pull=False)

    def pull(self, flight: InFlightChunk, task: int, start: int, end: int) -> None:
        """Note that ``flight`` asks for these bytes."""
        self._add(flight, task, start, end, pull=True)

    def acknowledge(self, task: int, start: int, end: int) -> list[InFlightChunk]:
        """Note that a server has these bytes; return the chunks whose bytes servers now have completely."""
        count = self._library.foretrain_inflight_acknowledge(self.native, task, start, end)
        return self._finished(count) if count else []

    def arrive(self, task: int, start: int, end: int) -> Arrived:
        """Note that the sum of these bytes has arrived."""
        new = self._library.foretrain_inflight_arrive(self.native, task, start, end, self._counts)
        finished, landed = self._counts
        ranges = [(low, high) for _, low, high, _ in self._ranges(0)] if new else []
        return Arrived(ranges, self._finished(finished), bool(landed))

    def finished(self, chunk: int) -> InFlightChunk:
        """Return a chunk that a wire has found finished."""
        self._unfinished -= 1
        return self._flights[chunk]

    def unanswered(self) -> Iterator[tuple[int, ByteRange]]:
        """Yield everything that was pushed and has not returned, by task."""
        return self._out(1)

    def unpulled(self) -> Iterator[tuple[int, ByteRange]]:
        """Yield everything that was pulled and has not returned, by task."""
        return self._out(2)

    def oldest(self) -> InFlightChunk | None:
        """Return the chunk that has been in flight longest."""
        flights = [byte_range.flight for _, byte_range in self.unanswered()]
        return min(flights, key=lambda flight: flight.issued, default=None)

    def _add(self, flight: InFlightChunk, task: int, start: int, end: int, *, pull: bool) -> None:
        number = id(flight)
        self._unfinished += number not in self._flights
        self._flights[number] = flight
        self._library.foretrain_inflight_add(self.native, number, task, start, end, pull)

    def _finished(self, count: int) -> list[InFlightChunk]:
        chunks = numbers([0] * count)
        self._library.foretrain_inflight_finished(self.native, chunks)
        return [self.finished(chunk) for chunk in chunks]

    def _out(self, which: int) -> Iterator[tuple[int, ByteRange]]:
        for task, start, end, chunk in self._ranges(which):
            yield task, ByteRange(start, end, self._flights[chunk])

    def _ranges(self, which: int) -> Iterator[Sequence[int]]:
        """Yield task, start, end and chunk of ranges, see wire.cpp."""
        room, flat = 0, numbers([])
        # A wire may change them between two calls.
        while (count := self._library.foretrain_inflight_ranges(self.native, which, flat, room)) > room:
            room, flat = count, numbers([0] * (4 * count))
        return iter([flat[place : place + 4] for place in range(0, 4 * count, 4)])


_WINDOW: Final = 8
"""Parts in flight."""
Send: TypeAlias = Callable[[int, Header, bytes], None]
"""Function that sends a message to a shard."""
Messages: TypeAlias = Callable[[ShardPart], Sequence[tuple[Header, bytes]]]
"""Function that makes the requests for a part."""


class StateTransfer:
    """Transfer of many parts' state to or from servers, beside the rounds. The engine's thread calls all but `wait`."""

    def __init__(self, parts: Iterable[ShardPart], messages: Messages) -> None:
        self._waiting = deque(parts)
        self._messages = messages
        self._asked: dict[int, ShardPart] = {}
        self._answered: dict[int, list[ShardPart]] = {}
        self._over = threading.Event()
        self.frames: dict[int, list[bytes]] = {}
        """Answers, by part."""

    def wait(self, check: Callable[[], None]) -> dict[int, list[bytes]]:
        """Wait for all answers and return them; ``check`` raises if they cannot come."""
        while not self._over.wait(0.1):
            check()
        return self.frames

    def begin(self, send: Send) -> None:
        """Ask for as many parts as may be in flight."""
        while self._waiting and len(self._asked) < _WINDOW:
            self._ask(self._waiting.popleft(), send)
        if not self._asked:
            self._over.set()

    def resend(self, shard: int, send: Send) -> None:
        """Ask ``shard`` again for what it has not answered, and after a restart also for what it had."""
        for part in [part for part in self._asked.values() if part.shard == shard]:
            self._ask(part, send)
        if not self._over.is_set():
            self._waiting.extend(self._answered.pop(shard, ()))
            self.begin(send)

    def hear(self, header: Header, payload: memoryview, send: Send) -> None:
        """Take a STATE message."""
        if header.part not in self._asked:
            return
        frames = self.frames[header.part]
        # A repeated answer, as after a connection broke, replaces the first.
        if header.step == 0:
            frames.clear()
        if header.offset:
            frames.append(bytes(payload))
        if len(frames) == header.offset:
            part = self._asked.pop(header.part)
            self._answered.setdefault(part.shard, []).append(part)
            self.begin(send)

    def _ask(self, part: ShardPart, send: Send) -> None:
        self._asked[part.number] = part
        self.frames[part.number] = []
        for header, payload in self._messages(part):
            send(part.shard, header, payload)
