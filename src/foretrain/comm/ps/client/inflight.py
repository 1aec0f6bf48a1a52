"""What is under way: chunks that no server has acknowledged, and bytes whose sums have not come back.

Credit returns with the acknowledgement and not with the sum. Workers need not push in the same order, and one whose
window was full of what another has yet to push, and the other way round, would wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from foretrain.tasks import Chunk


class InFlightChunk:
    """A chunk that is being pushed; ``done(chunk)`` is called when nothing of it is ``left``."""

    __slots__ = ("chunk", "done", "issued", "left")

    def __init__(self, chunk: Chunk, done: Callable[[Chunk], None], left: int, issued: int) -> None:
        self.chunk, self.done, self.left, self.issued = chunk, done, left, issued


class ByteRange(NamedTuple):
    """Bytes ``[start, end)`` of a task, and the chunk that they were pushed in."""

    start: int
    end: int
    flight: InFlightChunk


class Arrived(NamedTuple):
    """What an arrival has led to: ``new`` ranges of the task, pulls that are complete, whether the task has landed."""

    new: list[tuple[int, int]]
    pulled: list[InFlightChunk]
    landed: bool


class InFlight:
    """Of tasks of these ``sizes``; in each round every byte of a task is pushed once and comes back once.

    Servers answer byte by byte as the last worker has pushed it, so that what comes back is cut otherwise than what was
    pushed. What comes twice, as it may after a connection broke, counts once.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._unheard: list[list[ByteRange]] = [[] for _ in sizes]
        """Pushed, and not acknowledged."""
        self._out: list[list[ByteRange]] = [[] for _ in sizes]
        """Pushed, and not back."""
        self._pulls: list[list[ByteRange]] = [[] for _ in sizes]
        """Pulled, and not back."""
        self._left = list(sizes)

    def push(self, flight: InFlightChunk, task: int, start: int, end: int) -> None:
        """These bytes of ``flight`` are pushed."""
        stretch = ByteRange(start, end, flight)
        self._unheard[task].append(stretch)
        self._out[task].append(stretch)

    def pull(self, flight: InFlightChunk, task: int, start: int, end: int) -> None:
        """These bytes are asked for by ``flight``."""
        self._pulls[task].append(ByteRange(start, end, flight))

    def acknowledge(self, task: int, start: int, end: int) -> list[InFlightChunk]:
        """A server has these bytes: the chunks of which it, or others, have all now."""
        heard, self._unheard[task] = _split(self._unheard[task], start, end)
        return _finished(heard)

    def arrive(self, task: int, start: int, end: int) -> Arrived:
        """The sum of these bytes has come."""
        back, self._out[task] = _split(self._out[task], start, end)
        new = [(low, high) for low, high, _ in back]
        self._left[task] -= sum(high - low for low, high in new)
        landed = bool(new) and not self._left[task]
        if landed:
            self._left[task] = self._sizes[task]
        pulled, self._pulls[task] = _split(self._pulls[task], start, end)
        return Arrived(new, _finished(pulled), landed)

    def unanswered(self) -> Iterator[tuple[int, ByteRange]]:
        """Everything that was pushed and has not come back, by task."""
        return ((task, stretch) for task, stretches in enumerate(self._out) for stretch in stretches)

    def unpulled(self) -> Iterator[tuple[int, ByteRange]]:
        """Everything that was pulled and has not come back, by task."""
        return ((task, stretch) for task, stretches in enumerate(self._pulls) for stretch in stretches)

    def oldest(self) -> InFlightChunk | None:
        """What has been under way longest."""
        flights = [stretch.flight for stretches in self._out for stretch in stretches]
        return min(flights, key=lambda flight: flight.issued, default=None)


def _split(stretches: Sequence[ByteRange], start: int, end: int) -> tuple[list[ByteRange], list[ByteRange]]:
    """What of ``stretches`` is in ``[start, end)``, and what is not."""
    inside: list[ByteRange] = []
    outside: list[ByteRange] = []
    for stretch in stretches:
        low, high = max(start, stretch.start), min(end, stretch.end)
        if low >= high:
            outside.append(stretch)
            continue
        inside.append(stretch._replace(start=low, end=high))
        if stretch.start < low:
            outside.append(stretch._replace(end=low))
        if high < stretch.end:
            outside.append(stretch._replace(start=high))
    return inside, outside


def _finished(stretches: Sequence[ByteRange]) -> list[InFlightChunk]:
    """The flights of which nothing is left without ``stretches``."""
    finished = []
    for start, end, flight in stretches:
        flight.left -= end - start
        if not flight.left:
            finished.append(flight)
    return finished
