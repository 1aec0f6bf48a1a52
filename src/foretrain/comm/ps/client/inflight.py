"""Bytes in flight to and from servers: unacknowledged chunks, outstanding sums, and state transfers.

Credit returns with the acknowledgement and not with the sum. Workers need not push in the same order: two whose windows
were full of ranges that the other has yet to push would wait for ever.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

from foretrain.comm.ps.frames import Header
from foretrain.comm.ps.placement import ShardPart
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
    """Bytes in flight of tasks of these ``sizes``; in each round every byte is pushed once and returns once.

    Servers answer bytes as the last worker has pushed them, so that sums are cut otherwise than pushes. Duplicates,
    as after a connection broke, count once.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._unacknowledged: list[list[ByteRange]] = [[] for _ in sizes]
        self._pushed: list[list[ByteRange]] = [[] for _ in sizes]
        """Pushed ranges whose sums have not returned."""
        self._pulled: list[list[ByteRange]] = [[] for _ in sizes]
        """Pulled ranges that have not returned."""
        self._left = list(sizes)

    def push(self, flight: InFlightChunk, task: int, start: int, end: int) -> None:
        """Note that these bytes of ``flight`` are pushed."""
        byte_range = ByteRange(start, end, flight)
        self._unacknowledged[task].append(byte_range)
        self._pushed[task].append(byte_range)

    def pull(self, flight: InFlightChunk, task: int, start: int, end: int) -> None:
        """Note that ``flight`` asks for these bytes."""
        self._pulled[task].append(ByteRange(start, end, flight))

    def acknowledge(self, task: int, start: int, end: int) -> list[InFlightChunk]:
        """Note that a server has these bytes; return the chunks whose bytes servers now have completely."""
        heard, self._unacknowledged[task] = _split(self._unacknowledged[task], start, end)
        return _finished(heard)

    def arrive(self, task: int, start: int, end: int) -> Arrived:
        """Note that the sum of these bytes has arrived."""
        back, self._pushed[task] = _split(self._pushed[task], start, end)
        new = [(low, high) for low, high, _ in back]
        self._left[task] -= sum(high - low for low, high in new)
        landed = bool(new) and not self._left[task]
        if landed:
            self._left[task] = self._sizes[task]
        pulled, self._pulled[task] = _split(self._pulled[task], start, end)
        return Arrived(new, _finished(pulled), landed)

    def unanswered(self) -> Iterator[tuple[int, ByteRange]]:
        """Yield everything that was pushed and has not returned, by task."""
        return ((task, byte_range) for task, byte_ranges in enumerate(self._pushed) for byte_range in byte_ranges)

    def unpulled(self) -> Iterator[tuple[int, ByteRange]]:
        """Yield everything that was pulled and has not returned, by task."""
        return ((task, byte_range) for task, byte_ranges in enumerate(self._pulled) for byte_range in byte_ranges)

    def oldest(self) -> InFlightChunk | None:
        """Return the chunk that has been in flight longest."""
        flights = [byte_range.flight for byte_ranges in self._pushed for byte_range in byte_ranges]
        return min(flights, key=lambda flight: flight.issued, default=None)


def _split(byte_ranges: Sequence[ByteRange], start: int, end: int) -> tuple[list[ByteRange], list[ByteRange]]:
    """Return the parts of ``byte_ranges`` inside ``[start, end)`` and those outside."""
    inside: list[ByteRange] = []
    outside: list[ByteRange] = []
    for byte_range in byte_ranges:
        first, last, flight = byte_range
        if last <= start or end <= first:
            outside.append(byte_range)
        elif start <= first and last <= end:
            inside.append(byte_range)
        else:
            low, high = max(start, first), min(end, last)
            inside.append(ByteRange(low, high, flight))
            if first < low:
                outside.append(ByteRange(first, low, flight))
            if high < last:
                outside.append(ByteRange(high, last, flight))
    return inside, outside


def _finished(byte_ranges: Sequence[ByteRange]) -> list[InFlightChunk]:
    """Return the chunks that have nothing left once ``byte_ranges`` are taken away."""
    finished = []
    for start, end, flight in byte_ranges:
        flight.left -= end - start
        if not flight.left:
            finished.append(flight)
    return finished


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
