"""Traces that ``torch.profiler`` exports, in virtual time and with the simulated GPU's kernels."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from foretrain.trace import kineto_arrow, kineto_event, kineto_metadata, microseconds, stream_number
from foretrain.units import Time

_HOSTS = ("cpu_op", "user_annotation", "cpu_instant_event", "python_function")


class Launched(NamedTuple):
    """Work that ran on the GPU; times in ps of the rank's clock.

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
        """Return the GPU of its stream."""
        return self.stream >> 16

    @property
    def cuda_stream(self) -> int:
        """Return the stream's number as in CUDA's tools."""
        return stream_number(self.stream)


def virtual(
    text: str, clock: Callable[[int], int], launches: Sequence[Launched], numbers: Mapping[int, int], *, hosts: bool
) -> str:
    """Return the trace ``text`` with other times, since the rank began, and what the GPU ran.

    Args:
        text: JSON, as PyTorch's profiler writes it; its times are of the real clock.
        clock: the rank's clock by the real one, ns.
        launches: work that ran on the GPU.
        numbers: by index of a function, the number that the profiler has given it.
        hosts: whether to keep the events of the host.
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
    """Convert a number of the trace exactly."""
    text = microseconds.text if isinstance(microseconds, _Number) else str(microseconds)
    return int(Decimal(text) * 1000)


def _launch(one: Launched, number: int, function: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Return the call of CUDA's runtime, the kernel, and the arrow from one to the other."""
    process, thread = function.get("pid", 0), function.get("tid", 0)
    ids = {"External id": number, "correlation": one.number}
    yield kineto_event("cuda_runtime", one.call, process, thread, one.asked, one.launched, ids)
    place = {"device": one.device, "context": 1, "stream": one.cuda_stream}
    size = {"bytes": one.size} if one.size else {}
    yield kineto_event(one.kind, one.kernel, one.device, one.cuda_stream, one.begin, one.end, ids | place | size)
    yield from kineto_arrow(one.number, (process, thread, one.asked), (one.device, one.cuda_stream, one.begin))


def _on_the_gpu(ranges: Iterable[Mapping[str, Any]], launches: Sequence[Launched]) -> Iterator[dict[str, Any]]:
    """Yield for each range of the script, on each stream, the span of its launches, from the first to the last."""
    for one in ranges:
        begin, end = one["ts"], one["ts"] + one["dur"]
        streams: dict[int, list[Launched]] = {}
        for launch in launches:
            if begin < microseconds(launch.launched) <= end:
                streams.setdefault(launch.stream, []).append(launch)
        for inside in streams.values():
            place = inside[0].device, inside[0].cuda_stream
            over = max(launch.end for launch in inside)
            yield kineto_event("gpu_user_annotation", one["name"], *place, inside[0].begin, over, dict(one["args"]))


def _lanes(launches: Iterable[Launched]) -> Iterator[dict[str, Any]]:
    """Yield the names of GPUs and streams."""
    streams = sorted({(one.device, one.cuda_stream) for one in launches})
    for device in sorted({device for device, _ in streams}):
        yield kineto_metadata("process_name", device, 0, {"name": "python"})
        yield kineto_metadata("process_labels", device, 0, {"labels": f"GPU {device}"})
    for device, stream in streams:
        yield kineto_metadata("thread_name", device, stream, {"name": f"stream {stream}"})


_KERNELS = {
    "all_reduce": "AllReduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "barrier": "AllReduce",
}
"""Kernels of NCCL by operation; all others are sends and receives."""
_NAMES = {
    "all_reduce": "allreduce",
    "all_gather": "_allgather_base",
    "reduce_scatter": "_reduce_scatter_base",
    "all_to_all": "all_to_all",
}
"""Names of ProcessGroupNCCL that differ."""


def kernel_of(operation: str) -> str:
    """Return the kernel that NCCL runs for ``operation``, one of `foretrain.live.event_log.OPERATIONS` or a message."""
    return f"ncclDevKernel_{_KERNELS.get(operation, 'SendRecv')}"


def call_of(operation: str) -> str:
    """Return ProcessGroupNCCL's name of ``operation``."""
    return _NAMES.get(operation, operation)
