"""Spans in columns: the record of a run, simulated or real, behind every picture; and events of Kineto traces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

from foretrain.units import NANOSECOND, Time

Kind: TypeAlias = Literal["forward", "backward", "update", "communication", "wait"]
"""``wait`` is a GPU that could compute if a gradient had landed."""


class Span(NamedTuple):
    """Interval of work on a lane.

    Attributes:
        lane: where: ``"gpu"``, ``"optimizer"`` or the name of a pipe.
        kind: what kind of work.
        name: which layer or which tensors.
        step: of the training loop.
        start: ps.
        end: ps.
        size: bytes, for communication.
    """

    lane: str
    kind: Kind
    name: str
    step: int
    start: Time
    end: Time
    size: int = 0


class Timeline:
    """Spans, stored as columns in the order they were added."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._lanes: list[str] = []
        self._kinds: list[Kind] = []
        self._names: list[str] = []
        self._numbers: list[int] = []
        for span in spans:
            self.add(span)

    def add(self, span: Span) -> None:
        """Append a span."""
        self._lanes.append(span.lane)
        self._kinds.append(span.kind)
        self._names.append(span.name)
        self._numbers.extend(span[3:])

    def __len__(self) -> int:
        return len(self._lanes)

    def __iter__(self) -> Iterator[Span]:
        numbers = (self._numbers[column::4] for column in range(4))
        return map(Span._make, zip(self._lanes, self._kinds, self._names, *numbers, strict=True))

    def lanes(self) -> tuple[str, ...]:
        """Return the lanes in the order of their first span."""
        return tuple(dict.fromkeys(self._lanes))

    def between(self, start: Time, end: Time) -> Timeline:
        """Return the spans that touch ``[start, end)``, clipped to it and shifted to begin at 0."""
        clipped = Timeline()
        for lane, kind, name, step, first, last, size in self:
            if first < end and last > start:
                low, high = max(first, start) - start, min(last, end) - start
                clipped.add(Span(lane, kind, name, step, low, high, size))
        return clipped

    def busy(self, lane: str, *kinds: Kind) -> Time:
        """Return the time in which ``lane`` did anything (of ``kinds``, if given), overlaps counted once."""
        total = covered = 0
        wanted = [(s.start, s.end) for s in self if s.lane == lane and (not kinds or s.kind in kinds)]
        for start, end in sorted(wanted):
            total += max(0, end - max(start, covered))
            covered = max(covered, end)
        return total

    def to_bytes(self) -> bytes:
        """Return canonical bytes: the same spans give the same bytes on every machine."""
        return b"\n".join(json.dumps(span, ensure_ascii=False, separators=(",", ":")).encode() for span in self)


# Events of the Chrome trace format, as PyTorch's profiler (Kineto) writes them.


def microseconds(time: Time) -> float:
    """Return ``time`` cut to the ns, in µs, the unit of the format."""
    return time // NANOSECOND / 1000


def stream_number(stream: int) -> int:
    """Return the number that CUDA's tools give to ``stream``, whose upper bits are its device; the default is 7."""
    return 7 + (stream & 0xFFFF)


def kineto_event(
    category: str, name: str, process: int, thread: int, begin: Time, end: Time, args: dict[str, Any]
) -> dict[str, Any]:
    """Return a complete event. Both ends are cut to the ns, so that events without a gap do not overlap."""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": microseconds(begin),
        "dur": (end // NANOSECOND - begin // NANOSECOND) / 1000,
        "args": args,
    }


def kineto_arrow(number: int, source: tuple[int, int, Time], target: tuple[int, int, Time]) -> Iterator[dict[str, Any]]:
    """Yield the two ends of the arrow from a launch to its kernel; each end is (process, thread, time)."""
    flow = {"id": number, "cat": "ac2g", "name": "ac2g"}
    (process, thread, time), (device, stream, begin) = source, target
    yield {"ph": "s", "pid": process, "tid": thread, "ts": microseconds(time)} | flow
    yield {"ph": "f", "pid": device, "tid": stream, "ts": microseconds(begin), "bp": "e"} | flow


def kineto_metadata(kind: str, process: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    """Return an event that names or orders a process or thread, e.g. ``kind`` "thread_name"."""
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "ts": 0, "args": args}
