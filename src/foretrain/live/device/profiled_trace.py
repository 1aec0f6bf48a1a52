"""The trace that ``torch.profiler`` exports, in virtual time and with the simulated GPU's kernels."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from foretrain.units import NANOSECOND, Time

_HOSTS = ("cpu_op", "user_annotation", "cpu_instant_event", "python_function")


class Launched(NamedTuple):
    """Something that ran on the GPU; times in ps of the rank's clock.

    Attributes:
        number: of the launch.
        kind: the profiler's category.
        call: of CUDA's runtime that launched it.
        kernel: its name.
        stream: ``device << 16 | stream``.
        asked: when the host began to launch it.
        launched: when the host had.
        begin: on its stream.
        end: on its stream.
        size: bytes of a communication.
        function: index of the host's function that launched it; -1 if none of those profiled did.
    """

    number: int
    kind: str
    call: str
    kernel: str
    stream: int
    asked: Time
    launched: Time
    begin: Time
    end: Time
    size: int
    function: int

    @property
    def device(self) -> int:
        """Of its stream."""
        return self.stream >> 16

    @property
    def cuda_stream(self) -> int:
        """As CUDA's tools number it."""
        return 7 + (self.stream & 0xFFFF)


def virtual(
    text: str, clock: Callable[[int], int], launches: Sequence[Launched], numbers: Mapping[int, int], *, hosts: bool
) -> str:
    """The trace ``text`` with other times, since the rank began, and what the GPU ran.

    Args:
        text: JSON, as PyTorch's profiler writes it; its times are of the real clock.
        clock: the rank's clock by the real one, ns.
        launches: what the GPU ran.
        numbers: by index of a function, the number that the profiler has given it.
        hosts: whether what the host did is wanted.
    """
    document = json.loads(text, parse_float=_Number)
    base = document.get("baseTimeNanoseconds", 0)
    events = [_moved(event, base, clock) for event in document["traceEvents"]]
    where = {event["args"].get("External id"): event for event in events if event.get("cat") in _HOSTS[:2]}
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    if not hosts:
        events = [event for event in events if event.get("cat") not in (*_HOSTS, "fwdbwd")]
    events += _lanes(launches)
    for one in launches:
        number = numbers.get(one.function, 0)
        events += _launch(one, number, where.get(number, {}))
    events += _on_the_gpu(ranges, launches)
    return json.dumps(document | {"baseTimeNanoseconds": 0, "traceEvents": events})


def _moved(event: dict[str, Any], base: int, clock: Callable[[int], int]) -> dict[str, Any]:
    if "ts" not in event:
        return event
    begin = base + _nanoseconds(event["ts"])
    start = clock(begin)
    moved = event | {"ts": start / 1000}
    if "dur" in event:
        moved["dur"] = (clock(begin + _nanoseconds(event["dur"])) - start) / 1000
    return moved


class _Number(float):
    """A number and its text: times in a trace have more digits than a float."""

    def __new__(cls, text: str) -> _Number:
        number = super().__new__(cls, text)
        number.text = text
        return number

    text: str


def _nanoseconds(microseconds: float) -> int:
    """Exactly; of a number of the trace."""
    text = microseconds.text if isinstance(microseconds, _Number) else str(microseconds)
    return int(Decimal(text) * 1000)


def _launch(one: Launched, number: int, function: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The call of CUDA's runtime, the kernel, and the arrow from one to the other."""
    process, thread = function.get("pid", 0), function.get("tid", 0)
    ids = {"External id": number, "correlation": one.number}
    yield _event("cuda_runtime", one.call, process, thread, one.asked, one.launched, ids)
    place = {"device": one.device, "context": 1, "stream": one.cuda_stream}
    size = {"bytes": one.size} if one.size else {}
    yield _event(one.kind, one.kernel, one.device, one.cuda_stream, one.begin, one.end, ids | place | size)
    arrow = {"id": one.number, "cat": "ac2g", "name": "ac2g"}
    yield {"ph": "s", "pid": process, "tid": thread, "ts": _microseconds(one.asked)} | arrow
    yield {"ph": "f", "pid": one.device, "tid": one.cuda_stream, "ts": _microseconds(one.begin), "bp": "e"} | arrow


def _on_the_gpu(ranges: Iterable[Mapping[str, Any]], launches: Sequence[Launched]) -> Iterator[dict[str, Any]]:
    """For each range of the script, on each stream, what was launched in it, from the first to the last."""
    for one in ranges:
        begin, end = one["ts"], one["ts"] + one["dur"]
        streams: dict[int, list[Launched]] = {}
        for launch in launches:
            if begin < _microseconds(launch.launched) <= end:
                streams.setdefault(launch.stream, []).append(launch)
        for inside in streams.values():
            place = inside[0].device, inside[0].cuda_stream
            over = max(launch.end for launch in inside)
            yield _event("gpu_user_annotation", one["name"], *place, inside[0].begin, over, dict(one["args"]))


def _lanes(launches: Iterable[Launched]) -> Iterator[dict[str, Any]]:
    """What GPUs and streams are called."""
    streams = sorted({(one.device, one.cuda_stream) for one in launches})
    for device in sorted({device for device, _ in streams}):
        yield {"ph": "M", "name": "process_name", "pid": device, "tid": 0, "ts": 0, "args": {"name": "python"}}
        labels = {"labels": f"GPU {device}"}
        yield {"ph": "M", "name": "process_labels", "pid": device, "tid": 0, "ts": 0, "args": labels}
    for device, stream in streams:
        name = {"name": f"stream {stream}"}
        yield {"ph": "M", "name": "thread_name", "pid": device, "tid": stream, "ts": 0, "args": name}


def _event(
    category: str, name: str, process: int, thread: int, begin: Time, end: Time, args: dict[str, Any]
) -> dict[str, Any]:
    where = {"ph": "X", "cat": category, "name": name, "pid": process, "tid": thread}
    duration = end // NANOSECOND - begin // NANOSECOND
    return where | {"ts": _microseconds(begin), "dur": duration / 1000, "args": args}


def _microseconds(time: Time) -> float:
    return time // NANOSECOND / 1000
