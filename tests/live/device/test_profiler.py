"""torch.profiler and NVTX on simulated GPUs."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from tests.live.command import on_gpus, simulate

CLUSTER = "dgx-h100:1"


def events(path: Path, category: str) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_text()
    return [one for one in json.loads(text)["traceEvents"] if one.get("cat") == category]


@pytest.mark.smoke
def test_a_profile_has_the_kernels_in_virtual_time_and_changes_none() -> None:
    def script():
        from torch.profiler import ProfilerActivity, profile

        from tests.live.scripts.timing import seconds
        from tests.live.scripts.training import training

        steps = training()
        assert torch.cuda.nvtx.range_push("outer") == 0
        assert torch.cuda.nvtx.range_push("inner") == 1
        assert torch.cuda.nvtx.range_pop() == 1
        assert torch.cuda.nvtx.range_pop() == 0
        seconds(lambda: steps(2))
        alone = seconds(lambda: steps(3))
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
            profiled = seconds(lambda: steps(3))
        assert alone == profiled
        averages = prof.key_averages()
        rows = {one.key: one for one in averages if one.device_time_total}
        assert rows["mm_kernel"].count == 9
        assert rows["mm_kernel"].self_device_time_total > 0
        assert rows["mm_kernel"].device_time_total == rows["aten::mm"].device_time_total
        assert rows["aten::linear"].device_time_total == rows["addmm_kernel"].device_time_total
        assert rows["ncclDevKernel_AllReduce"].count == 6
        assert rows["c10d::allreduce_"].device_time_total == rows["ncclDevKernel_AllReduce"].device_time_total
        assert rows["forward"].device_time_total > rows["aten::linear"].device_time_total
        assert rows["aten::mm"].cpu_time_total == 9 * 6.0  # one launch each
        busy = max(one.time_range.end for one in prof.events() if one.name.endswith("_kernel"))
        assert profiled * 1e6 <= busy <= profiled * 1e6 + 100
        table = averages.table(sort_by="cuda_time_total", row_limit=5)
        assert "mm_kernel" in table
        assert "Self CUDA time total" in table

    told = simulate(CLUSTER, script).err
    assert "Traceback" not in told
    assert "Failed to record" not in told


def test_a_schedule_exports_traces_in_virtual_time(tmp_path: Path) -> None:
    def script():
        from torch.profiler import ProfilerActivity, profile, schedule

        from tests.live.scripts.training import training

        steps = training()
        with profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
            schedule=schedule(wait=1, warmup=1, active=2, repeat=2),
            on_trace_ready=lambda prof: prof.export_chrome_trace(f"{sys.argv[1]}/{prof.step_num}.json"),
            record_shapes=True,
            with_stack=True,
            profile_memory=True,
        ) as prof:
            steps(8, prof.step)

    simulate(CLUSTER, script, tmp_path)
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


@on_gpus()
def test_a_profile_of_the_gpu_alone_or_of_the_host_alone() -> None:
    from torch.profiler import ProfilerActivity, profile

    from tests.live.scripts.training import training

    steps = training()
    for kind, device in ((ProfilerActivity.CUDA, "CUDA"), (ProfilerActivity.CPU, "CPU")):
        with profile(activities=[kind]) as prof:
            steps(1)
        assert {str(one.device_type) for one in prof.events()} == {f"DeviceType.{device}"}
    with torch.autograd.profiler.emit_nvtx():
        steps(1)


def traces(folder: Path) -> None:
    """Writes the trace of --trace, twice, and that of the script's own profiler."""

    def script():
        from torch.profiler import ProfilerActivity, profile

        from tests.live.scripts.training import training

        steps = training()
        if sys.argv[1:]:
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
                steps(4, prof.step)
            prof.export_chrome_trace(sys.argv[1])
        else:
            steps(4)

    for name in ("once", "again"):
        (folder / name).mkdir()
        simulate(CLUSTER, script, options=("--trace", folder / name))
    (folder / "exported").mkdir()
    simulate(CLUSTER, script, folder / "exported" / "rank0.json.gz")


@pytest.mark.filterwarnings("ignore")  # of the package's own use of pandas
def test_ranges_of_the_script_are_in_the_trace_which_is_the_same_again(tmp_path: Path) -> None:
    traces(tmp_path)
    (once,), (again,) = ((tmp_path / name).iterdir() for name in ("once", "again"))
    assert gzip.decompress(once.read_bytes()) == gzip.decompress(again.read_bytes())
    ranges = events(once, "user_annotation")
    assert {one["name"] for one in ranges} >= {"forward", "backward", "Optimizer.step#SGD.step"}
    shadows = {(one["name"], one["tid"]): one for one in events(once, "gpu_user_annotation")}
    kernels = events(once, "kernel")
    assert {tid for name, tid in shadows if name == "backward"} == {one["tid"] for one in kernels}
    products = [one for one in kernels if one["name"] == "aten::addmm"]
    forward = shadows["forward", products[-1]["tid"]]
    assert forward["ts"] <= products[-1]["ts"] < forward["ts"] + forward["dur"]
    hta = pytest.importorskip("hta.trace_analysis", reason="HolisticTraceAnalysis is not installed")
    for name in ("once", "exported"):
        analysis = hta.TraceAnalysis(trace_dir=str(tmp_path / name), include_last_profiler_step=True)
        assert analysis.get_gpu_kernel_breakdown(visualize=False)[0]["sum"].sum() > 0
        found = analysis.get_gpu_user_annotation_breakdown(visualize=False)
        assert set(found["name"]) >= {"forward", "Optimizer.step#SGD.step"}
        assert analysis.get_cuda_kernel_launch_stats(visualize=False)[0].shape[0] > 10
