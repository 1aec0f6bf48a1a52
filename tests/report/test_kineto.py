import gzip
import json
from itertools import pairwise

from foretrain.device import preset
from foretrain.live.event_log import ANNOTATION, NAME, STREAM
from foretrain.report.kineto import trace_paths, write_trace
from foretrain.units import MICROSECOND, MILLISECOND
from tests.live.player import play

MS = MILLISECOND


def training(steps):
    """Forward and backward of 3 ms, of which 2 while gradients are summed for 5 ms; 1 ms of optimizer."""

    def program(rank):
        for number, name in enumerate((b"aten::mm", b"aten::add", b"Memcpy DtoH (Device -> Pageable)")):
            rank.note(NAME, a=number, payload=name)
        for step in range(1, steps + 1):
            rank.note(ANNOTATION, a=1, payload=b"forward")
            rank.kernels(0, MS, every=2 * MICROSECOND)
            rank.note(ANNOTATION)
            forward = rank.record(0)
            rank.kernels(0, MS, MS)
            rank.wait(2, forward)
            reduced = rank.call(2, "all_reduce", 1 << 20)
            rank.wait(0, reduced)
            rank.kernels(0, MS)
            rank.step(step, rank.record(0))
            yield rank.ask(STREAM, stream=0)

    return program


def played(steps=3, ranks=2):
    return play(*[training(steps)] * ranks, duration=5 * MS, kept=None).trace


def read(path):
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def spans(document, category):
    return [event for event in document["traceEvents"] if event.get("cat") == category and event["ph"] == "X"]


def test_a_kernel_has_its_launch_and_its_step(tmp_path):
    (path,) = write_trace(played(2, 1), tmp_path / "t.json", world=8, device=preset("H100"))
    document = read(path)
    assert document["distributedInfo"] == {"backend": "nccl", "rank": 0, "world_size": 8}
    assert document["deviceProperties"][0]["numSms"] == 132
    assert {"schemaVersion", "traceEvents", "displayTimeUnit"} <= document.keys()
    kernels, calls = spans(document, "kernel"), spans(document, "cuda_runtime")
    launched = {call["args"]["correlation"]: call for call in calls if "correlation" in call["args"]}
    assert len(kernels) == len(launched) == 10
    for kernel in kernels:
        call = launched[kernel["args"]["correlation"]]
        assert call["ts"] + call["dur"] <= kernel["ts"]
        assert call["args"]["External id"] == kernel["args"]["External id"]
        assert kernel["tid"] == kernel["args"]["stream"]
    steps = [event for event in spans(document, "user_annotation") if event["name"].startswith("ProfilerStep#")]
    assert [(step["name"], step["ts"], step["dur"]) for step in steps] == [
        ("ProfilerStep#1", 0.0, 0.0),
        ("ProfilerStep#2", 0.0, 7000.0),
    ]
    assert [event["name"] for event in spans(document, "user_annotation")].count("forward") == 2
    stops = [call for call in calls if call["name"] == "cudaStreamSynchronize"]
    assert [(stop["ts"], stop["dur"]) for stop in stops] == [(0, 7000), (7000, 7000)]


def test_what_a_communication_is_called(tmp_path):
    (path,) = write_trace(played(1, 1), tmp_path / "t.json")
    (kernel,) = [one for one in spans(read(path), "kernel") if one["name"].startswith("nccl")]
    assert kernel["name"] == "ncclDevKernel_AllReduce"
    assert (kernel["ts"], kernel["dur"], kernel["tid"]) == (1000, 5000, 9)
    args = kernel["args"]
    assert (args["Collective name"], args["Group size"], args["Process Group Ranks"]) == ("allreduce", 1, "[0]")
    assert (args["In msg nelems"], args["Out msg nelems"], args["dtype"]) == (1 << 20, 1 << 20, "Byte")


def test_waiting_is_inside_the_kernel_and_messages_of_a_group_are_one(tmp_path):
    def program(rank):
        rank.run(0, MS if rank.number else 3 * MS)
        rank.message(0, 1 - rank.number, 64, sends=True, more=True)
        rank.message(0, 1 - rank.number, 32, sends=False)
        yield rank.ask(STREAM)

    def other(rank):
        rank.run(0, MS)
        rank.message(0, 0, 32, sends=True, more=True)
        rank.message(0, 0, 64, sends=False)
        yield rank.ask(STREAM)

    trace = play(program, other, duration=2 * MS, kept=None).trace
    first, second = write_trace(trace, tmp_path / "t.json")
    (kernel,) = [one for one in spans(read(second), "kernel") if one["name"] == "ncclDevKernel_SendRecv"]
    assert (kernel["ts"], kernel["dur"]) == (1000, 4000)
    assert kernel["args"]["Waiting for members (us)"] == 2000
    assert (kernel["args"]["In msg nelems"], kernel["args"]["Out msg nelems"]) == (32, 64)
    (kernel,) = [one for one in spans(read(first), "kernel") if one["name"] == "ncclDevKernel_SendRecv"]
    assert kernel["args"]["Waiting for members (us)"] == 0


def test_a_copy_is_no_kernel(tmp_path):
    def program(rank):
        rank.note(NAME, a=0, payload=b"Memcpy DtoH (Device -> Pageable)")
        rank.note(NAME, a=1, payload=b"Memset (Device)")
        rank.kernels(0, MS, MS)
        yield rank.ask(STREAM)

    (path,) = write_trace(play(program, kept=None).trace, tmp_path / "t.json")
    document = read(path)
    assert not spans(document, "kernel")
    assert [len(spans(document, name)) for name in ("gpu_memcpy", "gpu_memset")] == [1, 1]
    assert [call["name"] for call in spans(document, "cuda_runtime")][1:] == ["cudaMemcpyAsync", "cudaMemsetAsync"]


def test_ranges_of_the_host_have_a_lane_a_thread_and_shadows_on_the_gpu(tmp_path):
    def program(rank):
        rank.note(ANNOTATION, a=1, payload=b"outer")
        for stream in (0, 3):
            rank.note(ANNOTATION, a=1, payload=b"inner")
            rank.clock += 10 * MICROSECOND
            rank.kernels(stream, MS, MS, copied=2 * MS if stream else 0)  # streams would share the GPU
            rank.note(ANNOTATION)
        rank.note(ANNOTATION, a=1, b=1, payload=b"elsewhere")
        rank.clock += MICROSECOND
        rank.note(ANNOTATION, b=1)
        rank.note(ANNOTATION)
        yield rank.ask(STREAM, stream=0)

    document = read(*write_trace(play(program, kept=None).trace, tmp_path / "t.json"))
    threads = {
        event["tid"]: event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"
    }
    on_host = [(threads[one["tid"]], one["name"], one["dur"]) for one in spans(document, "user_annotation")]
    assert on_host == [
        ("host", "inner", 10.0),
        ("host", "inner", 10.0),
        ("host", "outer", 21.0),
        ("host, thread 1", "elsewhere", 1.0),
    ]
    shadows = [(one["tid"], one["name"], one["ts"], one["dur"]) for one in spans(document, "gpu_user_annotation")]
    assert shadows == [
        (7, "inner", 10.0, 2000.0),
        (10, "inner", 20.0, 2000.0),
        (7, "outer", 10.0, 2000.0),
        (10, "outer", 20.0, 2000.0),
    ]


def test_kernels_of_a_stream_follow_each_other_and_names_of_files(tmp_path):
    paths = write_trace(played(3, 2), tmp_path / "t.json.gz")
    assert [path.name for path in paths] == ["t.rank0.json.gz", "t.rank1.json.gz"]
    for path in paths:
        by_stream = {}
        for kernel in spans(read(path), "kernel"):
            by_stream.setdefault(kernel["tid"], []).append((kernel["ts"], kernel["ts"] + kernel["dur"]))
        for each in by_stream.values():
            each.sort()
            assert all(before[1] <= after[0] for before, after in pairwise(each))
    folder = write_trace(played(1, 2), tmp_path / "folder")
    assert [path.name for path in folder] == ["rank0.pt.trace.json.gz", "rank1.pt.trace.json.gz"]
    assert trace_paths(tmp_path / "t.json", [4]) == {4: tmp_path / "t.json"}
    again = tmp_path / "again"
    again.mkdir()
    assert [path.read_bytes() for path in write_trace(played(1, 2), again)] == [path.read_bytes() for path in folder]
