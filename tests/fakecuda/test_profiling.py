"""torch.profiler and NVTX on simulated GPUs."""

from __future__ import annotations

from pathlib import Path

from tests.fakecuda.simulated import simulated


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
