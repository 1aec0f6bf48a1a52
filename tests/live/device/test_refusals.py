"""Mistakes that a GPU refuses, in PyTorch's words."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.device.simulated import simulated

REFUSED = """
    def refused(words, call):
        try:
            call()
        except (RuntimeError, ValueError) as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)
"""


def test_tensors_on_different_devices(tmp_path: Path) -> None:
    simulated(
        tmp_path,
        REFUSED
        + """
    functional = torch.nn.functional
    for n in (4, 1024):
        here, host = torch.ones(n, n, device="cuda"), torch.ones(n, n)
        found = "found at least two devices, cuda:0 and cpu!"
        refused(found, lambda: here + host)
        refused(found, lambda: here.add_(host))
        refused("but got mat2 is on cpu, different from other tensors on cuda:0", lambda: here @ host)
        indices = torch.zeros(n, dtype=torch.long)
        refused("but got index is on cpu", lambda: functional.embedding(indices, here))
        weights = torch.ones(n, n, 1, 1)
        refused("should be the same", lambda: functional.conv2d(here.view(1, n, n, 1), weights))
        assert (here + torch.tensor(1.0)).shape == here.where(here > 0, torch.tensor(0.0)).shape == here.shape
        assert here[indices].shape == here.shape
        here[indices] = 1.0
    """,
        "--live",
        "1",
    )


def test_factors_of_different_types(tmp_path: Path) -> None:
    simulated(
        tmp_path,
        REFUSED
        + """
    for n in (4, 1024):
        single, half = torch.ones(n, n, device="cuda"), torch.ones(n, n, device="cuda", dtype=torch.half)
        refused("expected mat1 and mat2 to have the same dtype, but got: float != c10::Half", lambda: single @ half)
        layer = torch.nn.Linear(n, n, device="cuda")
        refused("expected mat1 and mat2 to have the same dtype, but got: c10::Half != float", lambda: layer(half))
        refused("expected scalar type Float but found Half", lambda: torch.bmm(single[None], half[None]))
        image, kernel = half.view(1, n, n, 1), single.view(n, n, 1, 1)
        refused("should be the same", lambda: torch.nn.functional.conv2d(image, kernel))
        with torch.autocast("cuda", torch.bfloat16):
            layer(half)
        assert (single + half).dtype == torch.float
    """,
        "--live",
        "1",
    )


def test_events_that_were_not_made_for_timing(tmp_path: Path) -> None:
    simulated(
        tmp_path,
        REFUSED
        + """
    plain, timed = torch.cuda.Event(), torch.cuda.Event(enable_timing=True)
    plain.record()
    timed.record()
    refused("enable_timing=True", lambda: plain.elapsed_time(timed))
    """,
        "--live",
        "1",
    )


def test_one_process_for_several_gpus(tmp_path: Path) -> None:
    simulated(
        tmp_path,
        REFUSED
        + """
    model = torch.nn.DataParallel(torch.nn.Linear(4, 4).cuda())
    refused("use torch.nn.parallel.DistributedDataParallel", lambda: model(torch.ones(8, 4, device="cuda")))
    """,
        "--live",
        "1",
    )


@pytest.mark.parametrize(("gpu", "able"), [("A100", False), ("V100", False), ("L40S", True), ("H100", True)])
def test_eight_bits_need_a_gpu_that_has_them(tmp_path: Path, gpu: str, able: bool) -> None:
    simulated(
        tmp_path,
        REFUSED
        + f"""
    left = torch.ones(64, 64, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.ones((), device="cuda")
    multiply = lambda: torch._scaled_mm(left, left.t(), scale, scale, out_dtype=torch.bfloat16)
    if {able}:
        multiply()
    else:
        refused("only supported on CUDA devices with compute capability >= 9.0 or 8.9", multiply)
    """,
        cluster=gpu,
    )


def test_two_ranks_on_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, every = "dgx-h100:1,ranks=0-1", ("--live", "all")
    simulated(
        tmp_path,
        REFUSED
        + """
    rank = dist.get_rank()
    own, first = torch.ones(4, device=f"cuda:{rank}"), torch.ones(4, device="cuda:0")
    if rank:
        refused("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 0", lambda: dist.all_reduce(first))
    dist.all_reduce(own)
    dist.all_reduce(first, group=dist.new_group(backend="gloo"))
    """,
        *every,
        cluster=where,
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    simulated(tmp_path, "dist.all_reduce(torch.ones(4, device='cuda:0'))", *every, cluster=where)
