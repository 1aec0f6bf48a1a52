"""What optimizers of parameters on the host cost."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from foretrain.live.device.operator_cost import HostOptimizerStep, host_bandwidth
from foretrain.units import SECOND
from tests.live.device.simulated import simulated


@pytest.mark.parametrize(("threads", "rate"), [("1", 10e9), ("4", 40e9), ("64", 50e9), (None, 50e9), ("many", 50e9)])
def test_bandwidth_grows_with_threads_until_the_servers_memory_is_shared(threads, rate, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert host_bandwidth() == rate


def test_sgd_reads_parameters_and_gradients_and_writes_parameters(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    spent, told = [], []
    step = HostOptimizerStep(spent.append, told.append)
    weight = torch.nn.Parameter(torch.ones(1 << 20))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], foreach=False)
    for _ in range(2):
        step.begin([weight])
        optimizer.step()
        step.end()
    assert spent == [3 * weight.nbytes * SECOND // 10**10] * 2
    assert len(told) == 1
    small = torch.nn.Parameter(torch.ones(3))
    step.begin([small])
    step.end()
    assert len(spent) == 2


def test_offload_takes_time_and_says_so(tmp_path: Path) -> None:
    ended = simulated(
        tmp_path,
        """
        import time
        weight = torch.nn.Parameter(torch.ones(1 << 22))
        weight.grad = torch.ones_like(weight)
        optimizer = torch.optim.AdamW([weight])
        optimizer.step()
        begin = time.perf_counter()
        optimizer.step()
        took = time.perf_counter() - begin
        # PyTorch's AdamW reads and writes a parameter, its gradient and two moments some times over.
        assert 7 * weight.nbytes < took * 10e9 < 24 * weight.nbytes, took
        """,
    )
    assert "an optimizer's parameters are on the host" in ended.stdout


def test_a_rank_pays_for_its_own_part_of_distributed_parameters(tmp_path: Path) -> None:
    simulated(
        tmp_path,
        """
        import time
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
        model = torch.nn.Linear(4096, 4096, bias=False)
        fully_shard(model, offload_policy=CPUOffloadPolicy())
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(8, 4096, device="cuda")).sum().backward()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            optimizer.step()
            took = time.perf_counter() - begin
        mine = 4 * 4096 * 4096 // dist.get_world_size()
        assert 7 * mine < took * 10e9 < 24 * mine, took
        """,
        cluster="dgx-h100:1",
    )
