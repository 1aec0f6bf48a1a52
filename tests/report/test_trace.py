"""A trace file holds exactly the spans of the timeline."""

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest

from foretrain.errors import ConfigError
from foretrain.experiments import Comparison
from foretrain.report import write_trace
from foretrain.report.trace import tracks
from foretrain.simulation import simulate
from foretrain.workload import zoo


def test_json_holds_every_span(comparison: Comparison, tmp_path: Path):
    path = tmp_path / "trace.json"
    write_trace(comparison.runs, path)
    events = json.loads(path.read_text())["traceEvents"]
    for pid, run in enumerate(comparison.runs, start=1):
        drawn = sorted((e["ts"] * 1e6, e["dur"] * 1e6, e["cat"]) for e in events if e["ph"] == "X" and e["pid"] == pid)
        spans = sorted((float(s.start), float(s.end - s.start), s.kind) for s in run.timeline)
        assert [kind for *_, kind in drawn] == [kind for *_, kind in spans]
        assert [start for start, *_ in drawn] == pytest.approx([start for start, *_ in spans])
        assert sum(length for _, length, _ in drawn) == pytest.approx(sum(length for _, length, _ in spans))


def test_gzip_is_the_same_json_and_the_same_bytes_every_time(comparison: Comparison, tmp_path: Path):
    paths = [tmp_path / name for name in ("a.json", "b.json.gz", "c.json.gz")]
    for path in paths:
        write_trace(comparison.runs, path)
    assert gzip.decompress(paths[1].read_bytes()) == paths[0].read_bytes()
    assert paths[1].read_bytes() == paths[2].read_bytes()


def test_protobuf_slices_nest_and_match(comparison: Comparison, tmp_path: Path):
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

    path = tmp_path / "trace.perfetto"
    run = comparison.runs[0]
    write_trace([run], path)
    trace = Trace()
    trace.ParseFromString(path.read_bytes())
    names = {p.track_descriptor.uuid: p.track_descriptor.name for p in trace.packet if p.HasField("track_descriptor")}
    assert set(run.timeline.lanes()) <= set(names.values())
    begun: dict[int, int] = {}
    slices = []
    for packet in trace.packet:
        if not packet.HasField("track_event"):
            continue
        track = packet.track_event.track_uuid
        if packet.track_event.type == TrackEvent.TYPE_SLICE_BEGIN:
            assert track not in begun, "slices of one track overlap"
            begun[track] = packet.timestamp
        else:
            slices.append((begun.pop(track), packet.timestamp))
    assert not begun
    assert sorted(slices) == sorted((span.start // 1000, span.end // 1000) for span in run.timeline)


def test_overlapping_spans_go_to_different_tracks(comparison: Comparison):
    for run in comparison.runs:
        total = 0
        for _, spans in tracks(run.timeline):
            total += len(spans)
            assert all(a.end <= b.start for a, b in pairwise(spans))
        assert total == len(run.timeline)


def test_a_run_without_a_timeline_is_refused(tmp_path: Path):
    run = simulate(zoo("alexnet", batch=4), "2 workers @ 10Gbps", "fifo", trace=False)
    with pytest.raises(ConfigError, match="trace=True"):
        write_trace([run], tmp_path / "x.json")
    with pytest.raises(ConfigError, match="is empty"):
        write_trace([], tmp_path / "x.json")
    assert list(tmp_path.iterdir()) == []
