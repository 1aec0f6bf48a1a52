"""Hooks around an optimizer's step, and the settings that ranks start with."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn

from foretrain.live.device.operator_cost import HostOptimizerStep, host_bandwidth
from foretrain.live.device.settings import RankSettings
from foretrain.units import SECOND
from tests.live.command import on_gpus, simulate


def test_script_that_swallows_every_exception_makes_no_step_too_many() -> None:
    def script():
        weight = nn.Parameter(torch.ones(64, 64, device="cuda"))
        optimizer = torch.optim.SGD([weight])
        for _ in range(20):
            try:
                (weight @ weight).sum().backward()
                optimizer.step()
            except BaseException:
                time.sleep(0)

    ended = simulate("dgx-h100:1", script, options=("--steps", 4))
    assert len(ended.numbers["ranks"][0]["steps"]) == 4


def test_state_of_an_optimizer_that_was_loaded_is_its_state() -> None:
    def script():
        def adam():
            weight = nn.Parameter(torch.ones(4096, 4096, device="cuda"))
            return weight, torch.optim.Adam([weight])

        def train(weight, optimizer):
            for _ in range(3):
                weight.sum().backward()
                optimizer.step()

        weight, optimizer = adam()
        train(weight, optimizer)
        saved = {"state": {0: {name: value.cpu() for name, value in optimizer.state[weight].items()}}}
        saved["param_groups"] = optimizer.state_dict()["param_groups"]
        del weight, optimizer
        weight, optimizer = adam()
        optimizer.load_state_dict(saved)
        ballast = torch.empty(4096, 4096, device="cuda")
        train(weight, optimizer)
        del ballast

    breakdown = simulate("dgx-h100:1", script).numbers["ranks"][0]["memory"]["breakdown"]
    assert breakdown["optimizer"] >= 2 * 4096 * 4096 * 4
    assert breakdown["activations"] < 2 * 4096 * 4096 * 4


@pytest.mark.parametrize(("threads", "rate"), [("1", 10e9), ("4", 40e9), ("64", 50e9), ("", 50e9), ("many", 50e9)])
def test_bandwidth_grows_with_threads_until_the_servers_memory_is_shared(threads, rate, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert host_bandwidth() == rate


def test_sgd_on_the_host_reads_parameters_and_gradients_and_writes_parameters(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    spent, told = [], []
    step = HostOptimizerStep(spent.append, told.append)
    weight = nn.Parameter(torch.ones(1 << 20))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], foreach=False)
    for _ in range(2):
        step.begin([weight])
        optimizer.step()
        step.end()
    assert spent == [3 * weight.nbytes * SECOND // 10**10] * 2
    assert len(told) == 1
    step.begin([nn.Parameter(torch.ones(3))])  # too small to be charged
    step.end()
    assert len(spent) == 2


@on_gpus(says="an optimizer's parameters are on the host")
def test_a_rank_pays_for_its_own_part_of_parameters_on_the_host_and_says_so() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    model = nn.Linear(4096, 4096, bias=False)
    fully_shard(model, offload_policy=CPUOffloadPolicy())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(8, 4096, device="cuda")).sum().backward()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        optimizer.step()
        took = time.perf_counter() - begin
    mine = 4 * 4096 * 4096 // dist.get_world_size()
    # PyTorch's AdamW reads and writes a parameter, its gradient and two moments some times over.
    assert 7 * mine < took * 10e9 < 24 * mine


@on_gpus(cluster="gb200-nvl72:2,ranks=0-63+72-135")
def test_a_rack_is_many_machines_to_a_script() -> None:
    import os

    told = os.environ
    assert (told["WORLD_SIZE"], told["LOCAL_WORLD_SIZE"], told["GROUP_WORLD_SIZE"]) == ("128", "4", "32")
    assert torch.cuda.device_count() == 4
    assert torch.cuda.get_device_name() == "NVIDIA GB200"
    dist.all_reduce(torch.ones(8, device="cuda"))


@given(st.lists(st.text(), min_size=1).map(tuple), st.integers(1, 99), st.integers(1, 9), st.none() | st.integers(1))
def test_settings_survive_encoding_and_fill_one_server_after_the_other(
    script: tuple[str, ...], world: int, gpus: int, steps: int | None
) -> None:
    settings = RankSettings(script, "H100", world, gpus, "/store", module=True, steps=steps, factor=1.25)
    assert RankSettings.from_json(settings.to_json()) == settings
    told = [settings.environment(rank) for rank in range(world)]
    assert [int(one["RANK"]) for one in told] == list(range(world))
    seats = [(int(one["GROUP_RANK"]), int(one["LOCAL_RANK"])) for one in told]
    assert seats == sorted(set(seats))
    for one, (node, local) in zip(told, seats, strict=True):
        assert local < int(one["LOCAL_WORLD_SIZE"]) == sum(other == node for other, _ in seats)
        assert node < int(one["GROUP_WORLD_SIZE"]) == len({other for other, _ in seats})
        assert one["WORLD_SIZE"] == one["ROLE_WORLD_SIZE"] == str(world)
