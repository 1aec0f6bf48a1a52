"""What scripts ask of ``torch.cuda`` and ``torch.backends`` beyond tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.device.simulated import simulated


def test_settings_of_the_allocator_sleep_and_the_version_of_cudnn(tmp_path: Path) -> None:
    simulated(
        tmp_path,
        """
        torch.cuda.memory._set_allocator_settings("large_segment_size_mb:32")
        before = torch.cuda.memory_reserved()
        held = torch.empty(2 << 20, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() - before == 32 << 20
        try:
            torch.cuda.memory._set_allocator_settings("max_split_size_mb:none")
        except RuntimeError:
            pass
        else:
            raise AssertionError

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(1_980_000)
        end.record()
        end.synchronize()
        assert abs(begin.elapsed_time(end) - 1) < 0.1

        assert torch.backends.cudnn.is_available() and torch.backends.cudnn.version() == 91002
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False):
            rows = torch.empty(5, 3, 8, device="cuda", requires_grad=True)
            torch.nn.LSTM(8, 16, device="cuda")(rows)[0].sum().backward()
        """,
        "--live",
        "1",
    )


@pytest.mark.smoke
def test_runtime_and_handles(tmp_path: Path) -> None:
    simulated(
        tmp_path,
        """
        torch.cuda.profiler.start()
        torch.cuda.profiler.stop()
        with torch.cuda.profiler.profile():
            runtime = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaProfilerStart())
        torch.cuda.check_error(runtime.cudaHostRegister(0, 512, 0))
        assert runtime.cudaGetErrorString(runtime.cudaProfilerStop()) == "no error"
        assert runtime.cudaMemGetInfo(0) == torch.cuda.mem_get_info()
        assert isinstance(torch.cuda.current_blas_handle(), int)
        """,
        "--live",
        "1",
    )


def test_least_squares_and_saving_need_no_values(tmp_path: Path) -> None:
    ended = simulated(
        tmp_path,
        """
        for shape, sides in (((90, 80), (90, 70)), ((90, 80), (90,)), ((80, 90), (80, 70)), ((7, 90, 80), (1, 90, 70))):
            expected = torch.linalg.lstsq(torch.randn(shape), torch.randn(sides), driver="gels")
            found = torch.linalg.lstsq(torch.empty(shape, device="cuda"), torch.empty(sides, device="cuda"))
            assert [one.shape for one in found] == [one.shape for one in expected]
            assert [one.dtype for one in found] == [one.dtype for one in expected]
        torch.save({"weight": torch.empty(1 << 20, device="cuda")}, os.devnull)
        """,
        "--live",
        "1",
    )
    assert "values" not in ended.stdout + ended.stderr.split("meaningless")[1]
    assert "linalg_lstsq" in ended.stdout + ended.stderr


def test_tensors_on_the_host_are_exchanged_while_the_gpu_computes(tmp_path: Path) -> None:
    simulated(
        tmp_path,
        """
        import time
        host = dist.new_group(backend="gloo")
        big = torch.ones(1 << 14, 1 << 14, device="cuda")
        torch.cuda.synchronize()
        begin = time.perf_counter()
        big @ big
        dist.all_reduce(torch.ones(1), group=host)
        dist.barrier(group=host)
        host = time.perf_counter() - begin
        torch.cuda.synchronize()
        assert host < (time.perf_counter() - begin) / 2
        """,
    )
