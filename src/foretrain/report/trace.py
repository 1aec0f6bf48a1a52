"""Timelines as trace files, for ui.perfetto.dev, chrome://tracing and tools that read PyTorch's profiler (Kineto).

One process a schedule, one thread a lane. A lane whose spans overlap (the optimizer's) becomes several threads, because
a thread's slices may only nest.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from foretrain.errors import ConfigError, MissingExtra
from foretrain.files import write_atomically
from foretrain.simulation import Run
from foretrain.trace import Span, Timeline
from foretrain.units import MICROSECOND, NANOSECOND, Time, format_rate, format_time

Track = tuple[str, list[Span]]
"""A thread's name and its spans, none of which overlap, by start."""


def write_trace(runs: Sequence[Run], path: str | os.PathLike[str]) -> None:
    """Write the timelines of ``runs``: as JSON to ``*.json`` and ``*.json.gz``, else as a Perfetto protobuf.

    JSON keeps every picosecond; a protobuf holds whole nanoseconds, rounded down, and needs the package perfetto.
    """
    if not runs:
        raise ConfigError("runs", [], "is empty", "give at least one run")
    for run in runs:
        if not len(run.timeline):
            raise ConfigError("runs", str(run.schedule), "has no timeline", "simulate with trace=True")
    name = Path(path).name.lower()
    if name.endswith(".json"):
        write_atomically(path, trace_json(runs))
    elif name.endswith(".json.gz"):
        write_atomically(path, gzip.compress(trace_json(runs), mtime=0))  # no time of day: same runs, same bytes
    else:
        write_atomically(path, _protobuf(runs))


def tracks(timeline: Timeline) -> list[Track]:
    """Split each lane of ``timeline`` into as many tracks as its overlaps need."""
    found: list[Track] = []
    spans: dict[str, list[Span]] = {lane: [] for lane in timeline.lanes()}
    for span in timeline:
        spans[span.lane].append(span)
    for lane, members in spans.items():
        split: list[list[Span]] = []
        ends: list[Time] = []
        for span in sorted(members, key=lambda span: (span.start, span.end)):
            free = next((index for index, end in enumerate(ends) if end <= span.start), len(ends))
            if free == len(ends):
                split.append([])
                ends.append(0)
            split[free].append(span)
            ends[free] = span.end
        found += [(lane if index == 0 else f"{lane} {index + 1}", part) for index, part in enumerate(split)]
    return found


def _process(run: Run) -> str:
    return f"{run.schedule}: {format_time(run.iteration_time)} an iteration"


def trace_json(runs: Sequence[Run]) -> bytes:
    """Return the timelines of ``runs`` in Chrome's format."""
    document = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "traceName": f"{runs[0].workload.name} on {runs[0].cluster}",
        "traceEvents": [event for pid, run in enumerate(runs, start=1) for event in _events(run, pid)],
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _events(run: Run, pid: int) -> Iterator[dict[str, Any]]:
    """Chrome's trace events; ``ts`` and ``dur`` in µs."""
    yield _label("process", pid, 0, _process(run))
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for tid, (name, spans) in enumerate(tracks(run.timeline), start=1):
        yield _label("thread", pid, tid, name)
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
        for span in spans:
            yield {
                "ph": "X",
                "cat": span.kind,
                "name": _title(span),
                "pid": pid,
                "tid": tid,
                "ts": span.start / MICROSECOND,
                "dur": (span.end - span.start) / MICROSECOND,
                "args": dict(_details(span)),
            }


def _label(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _title(span: Span) -> str:
    return span.name if span.kind == "communication" else f"{span.kind} {span.name}"


def _details(span: Span) -> Iterator[tuple[str, int | str]]:
    yield "kind", span.kind
    yield "step", span.step
    if span.size:
        yield "bytes", span.size
        if span.end > span.start:
            yield "rate", format_rate(span.size / ((span.end - span.start) / 1e12))


def _protobuf(runs: Sequence[Run]) -> bytes:
    try:
        from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent
        from perfetto.trace_builder.proto_builder import TraceProtoBuilder
    except ModuleNotFoundError as error:
        raise MissingExtra("perfetto", "report", "a Perfetto trace") from error
    builder = TraceProtoBuilder()
    for pid, run in enumerate(runs, start=1):
        parent = pid << 16
        descriptor = builder.add_packet().track_descriptor
        descriptor.uuid, descriptor.process.pid, descriptor.process.process_name = parent, pid, _process(run)
        for tid, (name, spans) in enumerate(tracks(run.timeline), start=1):
            descriptor = builder.add_packet().track_descriptor
            descriptor.uuid, descriptor.parent_uuid, descriptor.name = parent + tid, parent, name
            descriptor.sibling_order_rank = tid
            for span in spans:
                packet = _packet(builder, span.start, parent + tid, TrackEvent.TYPE_SLICE_BEGIN)
                packet.track_event.name = _title(span)
                packet.track_event.categories.append(span.kind)
                _annotate(packet.track_event, span)
                _packet(builder, span.end, parent + tid, TrackEvent.TYPE_SLICE_END)
    return builder.serialize()


def _packet(builder: Any, time: Time, track: int, kind: int) -> Any:
    packet = builder.add_packet()
    packet.timestamp = time // NANOSECOND
    packet.trusted_packet_sequence_id = 1
    packet.track_event.type, packet.track_event.track_uuid = kind, track
    return packet


def _annotate(event: Any, span: Span) -> None:
    for name, value in _details(span):
        note = event.debug_annotations.add()
        note.name = name
        if isinstance(value, int):
            note.int_value = value
        else:
            note.string_value = value
