"""A live simulation as the traces that ``torch.profiler`` would have written: one Kineto file for each live rank.

They open in ui.perfetto.dev, chrome://tracing and TensorBoard, and Holistic Trace Analysis reads a folder of them.

# Note [As a profiler would see it]
A kernel of NCCL runs from when its stream gets to it, and waits for the other members inside; how long is among its
``args``. Messages of one NCCL group are one kernel. The default stream is number 7, as in every trace of CUDA, and the
others follow. Kernels bear the names of the operators that launch them: which kernels a GPU would choose is not known.
Element types are not known either: counts are of bytes. Times are of virtual time since the rank began, to the ns.
"""

from __future__ import annotations

import gzip
import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretrain.device import Device
from foretrain.device.model import PROVENANCES
from foretrain.files import write_atomically
from foretrain.live.device.profiled_trace import call_of, kernel_of
from foretrain.live.device.settings import LAUNCH
from foretrain.live.event_log import DEVICE, EVENT, ROOM
from foretrain.live.forecast import MESSAGES
from foretrain.live.rank_trace import HOST, Activity, RankTrace, SimulationTrace
from foretrain.trace import kineto_arrow, kineto_event, kineto_metadata, microseconds, stream_number
from foretrain.units import Time

_HOST_PROCESS = 100_000
"""Of rank 0; above all numbers of GPUs, whose processes they share a file with."""
_THREADS = 1_000_000
"""Between the numbers of a rank's threads."""
_FIRST = 1 << 16
"""Number of the first launch: in a short trace Holistic Trace Analysis keeps small ones in too few bits for its own."""
_STOPPING = {DEVICE: "cudaDeviceSynchronize", EVENT: "cudaEventSynchronize", ROOM: "cudaLaunchKernel"}
"""Calls in which the host stops, by what it asks for; otherwise for a stream."""
_RANKS_SHOWN = 30
"""Members of a group that are listed, as Kineto does."""


def write_trace(
    trace: SimulationTrace, path: str | os.PathLike[str], *, world: int | None = None, device: Device | None = None
) -> list[Path]:
    """Write one file for each live rank, each whole or not at all; compressed where names end in ``.gz``.

    Args:
        trace: with activities kept; without any, files hold no kernels.
        path: of the file of the only live rank. Of several, rank 3 gets ``name.rank3.json`` for ``name.json``. What
            ends neither in ``.json`` nor ``.json.gz`` is a folder, made where missing, for files that TensorBoard and
            Holistic Trace Analysis find.
        world: how many ranks there are; by default the live ones.
        device: what the GPUs are.

    Returns:
        The files, by rank.

    Raises:
        ConfigError: a file cannot be written.
    """
    paths = trace_paths(Path(path), trace.rank_traces)
    for rank, target in paths.items():
        target.parent.mkdir(exist_ok=True)
        data = _document(trace.rank_traces[rank], world or len(trace.rank_traces), device).encode()
        # No time of day in the compressed file: the same simulation gives the same bytes.
        write_atomically(target, gzip.compress(data, 6, mtime=0) if target.suffix == ".gz" else data)
    return list(paths.values())


def trace_paths(path: Path, ranks: Iterable[int]) -> dict[int, Path]:
    """Return the file of each rank; see `write_trace`."""
    ranks = sorted(ranks)
    ending = next((ending for ending in (".json.gz", ".json") if path.name.lower().endswith(ending)), None)
    if ending is None:
        return {rank: path / f"rank{rank}.pt.trace.json.gz" for rank in ranks}
    if len(ranks) == 1:
        return {ranks[0]: path}
    stem = path.name[: -len(ending)]
    return {rank: path.with_name(f"{stem}.rank{rank}{path.name[-len(ending) :]}") for rank in ranks}


def _document(rank_trace: RankTrace, world: int, device: Device | None) -> str:
    """Return the text of one rank's file, an event a line, with its rank near the top, where tools look for it."""
    head = {
        "schemaVersion": 1,
        "deviceProperties": [_properties(device)] if device else [],
        "distributedInfo": {"backend": "nccl", "rank": rank_trace.rank, "world_size": world},
        "traceName": f"rank {rank_trace.rank} simulated by foretrain",
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
    }
    lines = [f'"{key}": {json.dumps(value)}' for key, value in head.items()]
    events = ",\n".join(json.dumps(event, separators=(",", ":")) for event in _Rank(rank_trace).events())
    return "{\n" + ",\n".join([*lines, f'"traceEvents": [\n{events}\n]']) + "\n}\n"


def _properties(device: Device) -> dict[str, Any]:
    major, minor = device.capability
    return {
        "id": 0,
        "name": device.product or device.name,
        "totalGlobalMem": device.memory,
        "computeMajor": major,
        "computeMinor": minor,
        "numSms": device.sms,
        "warpSize": 32,
    }


@dataclass(frozen=True, slots=True)
class _Launch:
    """A launch of the host, and where it ran on the GPU.

    Attributes:
        op: the host's operator.
        call: of CUDA's runtime.
        kernel: its name on the GPU.
        category: Kineto's.
        stream: as the rank numbers it.
        host: when the host had launched it, ps.
        begin: on the GPU, ps.
        end: on the GPU, ps.
        details: further ``args`` of the kernel.
    """

    op: str
    call: str
    kernel: str
    category: str
    stream: int
    host: Time
    begin: Time
    end: Time
    details: Mapping[str, Any]


class _Rank:
    """Events of one rank."""

    def __init__(self, rank_trace: RankTrace) -> None:
        self._rank_trace = rank_trace
        self._process = _HOST_PROCESS + rank_trace.rank
        self._groups: dict[tuple[int, ...], int] = {}

    def events(self) -> Iterator[dict[str, Any]]:
        """All: names of lanes, then the host, then launches with what they launched."""
        activities = list(self._rank_trace.activities())
        launches = sorted(self._launches(activities), key=lambda launch: (launch.host, launch.begin, launch.stream))
        ranges = [*self._steps(), *(activity for activity in activities if activity.kind == "annotation")]
        threads = sorted({HOST - one.stream for one in ranges} | {0})
        yield from self._lanes(threads, sorted({launch.stream for launch in launches}))
        for one in ranges:
            yield self._on_host("user_annotation", one.name, one.start, one.end, {}, HOST - one.stream)
        yield from _on_the_gpu(ranges, launches)
        yield from self._stops()
        before = 0
        for number, launch in enumerate(launches, _FIRST):
            cost = 0 if launch.category == "communication" else LAUNCH
            yield from self._launch(number, launch, max(launch.host - cost, before))
            before = launch.host

    def _steps(self) -> Iterator[Activity]:
        """A range for each step that was kept, where the host made it, as ``profiler.step()`` marks them."""
        marks, since = self._rank_trace.marks, self._rank_trace.since
        for step in self._rank_trace.steps:
            if step.begin >= since and step.number in marks:
                begin = marks.get(step.number - 1, 0)
                yield Activity("annotation", HOST, f"ProfilerStep#{step.number}", begin, begin, marks[step.number])

    def _stops(self) -> Iterator[dict[str, Any]]:
        for stop in self._rank_trace.stops:
            call = _STOPPING.get(stop.question, "cudaStreamSynchronize")
            yield self._on_host("cuda_runtime", call, stop.asked, stop.answered, {})

    def _launch(self, number: int, launch: _Launch, begin: Time) -> Iterator[dict[str, Any]]:
        """Yield the operator, its call, the kernel, and the arrow from one to the other."""
        device, stream = launch.stream >> 16, stream_number(launch.stream)
        ids = {"External id": number, "correlation": number}
        yield self._on_host("cpu_op", launch.op, begin, launch.host, {"External id": number})
        yield self._on_host("cuda_runtime", launch.call, begin, launch.host, ids)
        category = "kernel" if launch.category == "communication" else launch.category
        args = {**ids, "device": device, "context": 1, "stream": stream, **launch.details}
        yield kineto_event(category, launch.kernel, device, stream, launch.begin, launch.end, args)
        yield from kineto_arrow(number, (self._process, self._process, begin), (device, stream, launch.begin))

    def _on_host(
        self, category: str, name: str, begin: Time, end: Time, args: dict[str, Any], thread: int = 0
    ) -> dict[str, Any]:
        return kineto_event(category, name, self._process, self._process + thread * _THREADS, begin, end, args)

    def _lanes(self, on_host: list[int], streams: list[int]) -> Iterator[dict[str, Any]]:
        """Yield names and order of processes and threads."""
        processes = {self._process: ("CPU", -1)} | {s >> 16: (f"GPU {s >> 16}", 1 + (s >> 16)) for s in streams}
        threads = [
            (self._process, self._process + thread * _THREADS, f"host, thread {thread}" if thread else "host")
            for thread in on_host
        ]
        threads += [(stream >> 16, stream_number(stream), f"stream {stream_number(stream)}") for stream in streams]
        for process, (label, order) in processes.items():
            for kind, args in (
                ("process_name", {"name": "python"}),
                ("process_labels", {"labels": f"{label}, rank {self._rank_trace.rank}"}),
                ("process_sort_index", {"sort_index": order}),
            ):
                yield kineto_metadata(kind, process, 0, args)
        for process, thread, name in threads:
            yield kineto_metadata("thread_name", process, thread, {"name": name})

    def _launches(self, activities: Iterable[Activity]) -> Iterator[_Launch]:
        batches: dict[tuple[int, Time], list[Activity]] = {}
        for activity in activities:
            if activity.kind == "kernel":
                yield _kernel(activity)
            elif activity.name in MESSAGES and activity.stream != HOST:
                batches.setdefault((activity.stream, activity.reached), []).append(activity)
            elif activity.kind == "communication":
                yield self._collective(activity)
        for batch in batches.values():
            yield self._batch(batch)

    def _collective(self, one: Activity) -> _Launch:
        sent, received = _elements(one.name, one.size, max(len(one.group), 1))
        name = call_of(one.name)
        details = {
            "Collective name": name,
            "In msg nelems": sent,
            "Out msg nelems": received,
            "Group size": len(one.group),
            "dtype": "Byte",
            **self._group(one.group),
            "Waiting for members (us)": microseconds(one.start - one.reached),
        }
        call, kernel = "cudaLaunchKernelExC", kernel_of(one.name)
        where = one.stream, one.launch, one.reached, one.end
        return _Launch(f"nccl:{name}", call, kernel, "communication", *where, details)

    def _batch(self, messages: list[Activity]) -> _Launch:
        first, end = messages[0], max(one.end for one in messages)
        sent = sum(one.size for one in messages if one.name == "send")
        received = sum(one.size for one in messages if one.name == "recv")
        name = first.name if len(messages) == 1 else "coalesced"
        details = {
            "Collective name": name,
            "In msg nelems": sent,
            "Out msg nelems": received,
            "Group size": 2,
            "dtype": "Byte",
            **self._group(tuple(sorted({rank for one in messages for rank in one.group}))),
            "Messages": [f"{one.name} {one.group[0]} to {one.group[1]}, {one.size:,} B" for one in messages],
            "Waiting for members (us)": microseconds(min(one.start for one in messages) - first.reached),
        }
        call, kernel = "cudaLaunchKernelExC", kernel_of("send")
        where = first.stream, first.launch, first.reached, end
        return _Launch(f"nccl:{name}", call, kernel, "communication", *where, details)

    def _group(self, members: tuple[int, ...]) -> dict[str, Any]:
        """Names of a group; the same in one file for the same members."""
        shown = ", ".join(map(str, members[:_RANKS_SHOWN])) + (", ..." if len(members) > _RANKS_SHOWN else "")
        number = self._groups.setdefault(members, len(self._groups))
        return {"Process Group Name": str(number), "Process Group Ranks": f"[{shown}]"}


def _on_the_gpu(ranges: Iterable[Activity], launches: Sequence[_Launch]) -> Iterator[dict[str, Any]]:
    """For each range, on each stream, what was launched in it: from the first's begin to the last's end."""
    times = [launch.host for launch in launches]
    for one in ranges:
        inside = launches[bisect_right(times, one.start) : bisect_right(times, one.end)]
        for stream in sorted({launch.stream for launch in inside}):
            here = [launch for launch in inside if launch.stream == stream]
            begin, end = min(launch.begin for launch in here), max(launch.end for launch in here)
            yield kineto_event("gpu_user_annotation", one.name, stream >> 16, stream_number(stream), begin, end, {})


def _kernel(one: Activity) -> _Launch:
    category, call = "kernel", "cudaLaunchKernel"
    if one.name.startswith("Memcpy"):
        category, call = "gpu_memcpy", "cudaMemcpyAsync"
    elif one.name.startswith("Memset"):
        category, call = "gpu_memset", "cudaMemsetAsync"
    op = "aten::copy_" if category == "gpu_memcpy" else one.name
    details = {"provenance": PROVENANCES[one.provenance]}
    return _Launch(op, call, one.name, category, one.stream, one.launch, one.start, one.end, details)


def _elements(operation: str, size: int, members: int) -> tuple[int, int]:
    """Return the bytes that one rank sends and receives."""
    sent = size // members if operation in ("all_gather", "gather") else size
    received = size // members if operation in ("reduce_scatter", "scatter") else size
    return sent, received
