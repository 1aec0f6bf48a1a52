"""torch.profiler and NVTX on simulated GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.live.device.simulated import simulated

TRAINING = """
    import sys
    from torch import nn
    from torch.profiler import ProfilerActivity, profile, record_function, schedule
    layers = [nn.Linear(4096, 4096) for _ in range(2)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).cuda())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.empty(512, 4096, device="cuda")

    def steps(number, after):
        for _ in range(number):
            with record_function("forward"):
                loss = model(x).sum()
            with torch.cuda.nvtx.range("backward"):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            after()
"""


def events(path: Path, category: str) -> list[dict[str, Any]]:
    return [one for one in json.loads(path.read_text())["traceEvents"] if one.get("cat") == category]


def test_the_profiler_shows_virtual_times_of_kernels(tmp_path: Path) -> None:
    done = simulated(
        tmp_path,
        """
        from torch.profiler import ProfilerActivity, profile
        a = torch.empty(4096, 4096, device="cuda")
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        a @ a
        end.record()
        end.synchronize()
        kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with torch.cuda.nvtx.range("product"), profile(activities=kinds) as prof:
            a @ a
        (product,) = (one for one in prof.key_averages() if one.key == "aten::mm")
        assert abs(product.device_time_total / 1e3 / begin.elapsed_time(end) - 1) < 0.02
        assert torch.cuda.nvtx.range_push("outer") == 0 and torch.cuda.nvtx.range_push("inner") == 1
        assert torch.cuda.nvtx.range_pop() == 1 and torch.cuda.nvtx.range_pop() == 0
        """,
    )
    assert "Failed to record" not in done.stderr


@pytest.mark.smoke
def test_a_profile_has_the_kernels_in_virtual_time_and_changes_none(tmp_path: Path) -> None:
    script = f"""{TRAINING}
    def timed(number, after):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        steps(number, after)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    timed(2, lambda: None)
    alone = timed(3, lambda: None)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        profiled = timed(3, lambda: None)
    assert alone == profiled, (alone, profiled)
    averages = prof.key_averages()
    rows = {{one.key: one for one in averages if one.device_time_total}}
    assert rows["mm_kernel"].count == 9 and rows["mm_kernel"].self_device_time_total > 0
    assert rows["mm_kernel"].device_time_total == rows["aten::mm"].device_time_total
    assert rows["aten::linear"].device_time_total == rows["addmm_kernel"].device_time_total
    assert rows["ncclDevKernel_AllReduce"].count == 6
    assert rows["c10d::allreduce_"].device_time_total == rows["ncclDevKernel_AllReduce"].device_time_total
    assert rows["forward"].device_time_total > rows["aten::linear"].device_time_total
    assert rows["aten::mm"].cpu_time_total == 9 * 6.0  # one launch each
    busy = max(one.time_range.end for one in prof.events() if one.name.endswith("_kernel"))
    assert profiled * 1e3 <= busy <= profiled * 1e3 + 100
    table = averages.table(sort_by="cuda_time_total", row_limit=5)
    assert "mm_kernel" in table and "Self CUDA time total" in table
    """
    assert "Traceback" not in simulated(tmp_path, script).stderr


def test_a_schedule_exports_traces_in_virtual_time(tmp_path: Path) -> None:
    script = f"""{TRAINING}
    def ready(prof):
        prof.export_chrome_trace(f"{tmp_path}/{{prof.step_num}}.json")

    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    plan = schedule(wait=1, warmup=1, active=2, repeat=2)
    with profile(
        activities=kinds, schedule=plan, on_trace_ready=ready, record_shapes=True, with_stack=True, profile_memory=True
    ) as prof:
        steps(8, prof.step)
    """
    simulated(tmp_path, script)
    found = []
    for path in (tmp_path / "4.json", tmp_path / "8.json"):
        kernels, calls = events(path, "kernel"), events(path, "cuda_runtime")
        assert kernels
        ops = {one["args"]["External id"]: one for one in events(path, "cpu_op")}
        launched = {one["args"]["correlation"]: one for one in calls}
        for kernel in kernels:
            call = launched[kernel["args"]["correlation"]]
            op = ops[kernel["args"]["External id"]]
            assert op["ts"] <= call["ts"] <= call["ts"] + call["dur"] <= kernel["ts"] + 1e-3
            assert call["ts"] + call["dur"] <= op["ts"] + op["dur"] + 1e-3
            assert call["tid"] == op["tid"]
        assert {one["name"] for one in events(path, "gpu_user_annotation")} >= {"forward", "ProfilerStep#3"} or found
        assert all(one["ts"] < 1e7 for one in events(path, "python_function"))  # us since the rank began
        found.append({(index, one["name"], one["tid"]): one["dur"] for index, one in enumerate(kernels)})
    assert found[0] == pytest.approx(found[1], abs=2e-3)  # both ends are cut to the ns


def test_a_profile_of_the_gpu_alone_or_of_the_host_alone(tmp_path: Path) -> None:
    script = f"""{TRAINING}
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        steps(1, lambda: None)
    assert {{str(one.device_type) for one in prof.events()}} == {{"DeviceType.CUDA"}}
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        steps(1, lambda: None)
    assert {{str(one.device_type) for one in prof.events()}} == {{"DeviceType.CPU"}}
    with torch.autograd.profiler.emit_nvtx():
        steps(1, lambda: None)
    """
    simulated(tmp_path, script)


def test_ranges_of_the_script_are_in_the_trace_which_is_the_same_again(tmp_path: Path) -> None:
    traces = []
    for name in ("once.json", "again.json"):
        path = tmp_path / name
        simulated(tmp_path, f"{TRAINING}\n    steps(4, lambda: None)\n", "--trace", str(path))
        traces.append(path)
    assert traces[0].read_bytes() == traces[1].read_bytes()
    ranges = events(traces[0], "user_annotation")
    assert {one["name"] for one in ranges} >= {"forward", "backward", "Optimizer.step#SGD.step"}
    shadows = {(one["name"], one["tid"]): one for one in events(traces[0], "gpu_user_annotation")}
    kernels = events(traces[0], "kernel")
    assert {tid for name, tid in shadows if name == "backward"} == {one["tid"] for one in kernels}
    products = [one for one in kernels if one["name"] == "aten::addmm"]
    forward = shadows["forward", products[-1]["tid"]]
    assert forward["ts"] <= products[-1]["ts"] < forward["ts"] + forward["dur"]


@pytest.mark.filterwarnings("ignore")  # of the package's own use of pandas
@pytest.mark.parametrize("exported", [False, True], ids=["of --trace", "of the script's profiler"])
def test_holistic_trace_analysis_reads_the_traces(tmp_path: Path, exported: bool) -> None:
    hta = pytest.importorskip("hta.trace_analysis", reason="HolisticTraceAnalysis is not installed")
    folder = tmp_path / "traces"
    folder.mkdir()
    if exported:
        script = f"""{TRAINING}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        steps(4, prof.step)
    prof.export_chrome_trace("{folder}/rank0.json.gz")
    """
        simulated(tmp_path, script)
    else:
        simulated(tmp_path, f"{TRAINING}\n    steps(4, lambda: None)\n", "--trace", str(folder))
    analysis = hta.TraceAnalysis(trace_dir=str(folder), include_last_profiler_step=True)
    assert analysis.get_gpu_kernel_breakdown(visualize=False)[0]["sum"].sum() > 0
    ranges = analysis.get_gpu_user_annotation_breakdown(visualize=False)
    assert set(ranges["name"]) >= {"forward", "Optimizer.step#SGD.step"}
    assert analysis.get_cuda_kernel_launch_stats(visualize=False)[0].shape[0] > 10
