"""One comparison for all pictures: it takes a moment. And one live simulation whose ranks are no script's."""

import json

import numpy as np
import pytest

from foretrain.device import preset
from foretrain.experiments import Comparison, compare, sweep
from foretrain.live.event_log import COST, MEMORY, NAME, STREAM, WARNING
from foretrain.live.forecast import forecast_of
from foretrain.live.network_traffic import NetworkTraffic
from foretrain.live.simulate import Simulated
from foretrain.network.deployment_notation import deployment
from foretrain.simulation.world import VirtualWorld
from foretrain.units import MILLISECOND
from foretrain.workload import zoo
from tests.live.player import folding_of, play

PLACE = "4x2xV100@10Gbps,ps=2"


@pytest.fixture(scope="session")
def comparison() -> Comparison:
    workload = zoo("alexnet", batch=16)
    names = ("ddp", "p3(slice=4MB)", "bytescheduler(partition=1MB)", "bytescheduler(partition=4MB)")
    table = compare(workload, PLACE, names, tuned=False)
    return table.with_sweep(sweep(workload, PLACE, names[:2], "rate=1Gbps:100Gbps", points=3, tuned=False))


def _training(rank):
    """Three steps: 6 ms of products and 2 of sums, of which 2 ms while 3 ms of communication are under way."""
    for number, name in enumerate((b"aten::mm", b"aten::add")):
        rank.note(NAME, a=number, payload=name)
    rank.note(WARNING, payload=b"<b>not real</b>")
    cost = {
        "kernels": 2,
        "flops": 4e12,
        "recomputed": 1e12,
        "times": [6 * MILLISECOND, 0, 2 * MILLISECOND, 0],
        "spread": MILLISECOND // 10,
        "by_name": {},
        "updates": {},
        "unknown": ["odd"],
        "unused": [],
    }
    for step in (1, 2, 3):
        rank.kernels(0, 6 * MILLISECOND)
        forward = rank.record(0)
        rank.kernels(0, 0, 2 * MILLISECOND)
        rank.wait(2, forward)
        rank.wait(0, rank.call(2, "all_reduce", 1 << 20))
        rank.step(step, rank.record(0))
        rank.note(COST, a=step, payload=json.dumps(cost).encode())
        yield rank.ask(STREAM)
    breakdown = {"parameters": 3 << 30, "gradients": 0, "activations": 17 << 30}
    memory = {"allocated": 20 << 30, "reserved": 21 << 30, "retries": 0, "breakdown": breakdown}
    memory["timeline"] = [[0, 3 << 30], [4 * MILLISECOND, 20 << 30], [9 * MILLISECOND, 3 << 30]]
    rank.note(MEMORY, payload=json.dumps(memory).encode())


def simulated(kept: int | None = 2) -> Simulated:
    where = deployment("dgx-h100:1").carried_by("nccl")
    folding = folding_of(*[0] * 8)
    trace = play(_training, duration=3 * MILLISECOND, folding=folding, kept=kept).trace
    carried = np.zeros(where.network.links)
    carried[3] = 0.25 * where.network.rate[3] * 9e-3
    forecast = forecast_of(
        trace.rank_traces,
        {0: 8},
        cluster="dgx-h100:1",
        device=preset("H100"),
        world=8,
        classes=("8 ranks in 1 class", "rank 0 stands for 0-7 (8)"),
        wall=1.5,
    )
    traffic = NetworkTraffic(VirtualWorld(), where, folding)
    return Simulated(forecast, trace, folding, traffic, where.network, carried, 79 << 30)


@pytest.fixture(scope="session")
def done() -> Simulated:
    return simulated()


@pytest.fixture(scope="session")
def unkept() -> Simulated:
    return simulated(kept=0)
