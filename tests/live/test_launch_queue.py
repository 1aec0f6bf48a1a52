"""Scripts that never wait for their GPU: the host cannot run ahead of it for ever."""

import json
import statistics
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn

from tests.live.command import simulate

_ONE = "dgx-h100:1,ranks=0"


def loop():
    """Trains without waiting for the GPU; prints how long its steps took."""
    layer = nn.Linear(4096, 4096, device="cuda")
    model = nn.parallel.DistributedDataParallel(layer) if dist.get_world_size() > 1 else layer
    optimizer = torch.optim.SGD(model.parameters())
    x, taken = torch.randn(4096, 4096, device="cuda"), []
    for _ in range(int(sys.argv[1])):
        begin = time.perf_counter()
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        print(json.dumps({"taken": taken}))


def test_steps_of_a_script_that_never_waits_take_as_long_as_they_are_forecast() -> None:
    ended = simulate(_ONE, loop, 400)
    forecast, taken = ended.numbers["iteration_time"], ended.lines[0]["taken"]
    assert max(taken[5:100]) < forecast / 10
    assert taken[-100:] == pytest.approx([forecast] * 100, rel=1e-3)


def test_steps_that_also_wait_for_each_other_do_on_average() -> None:
    ended = simulate("4x1xH100@10Gbps", loop, 600)
    taken = ended.lines[0]["taken"]
    assert statistics.mean(taken[-256:]) == pytest.approx(ended.numbers["iteration_time"], rel=0.02)


def test_replaying_a_graph_is_one_launch_that_takes_as_long_as_what_is_in_it() -> None:
    def script():
        x = nn.Parameter(torch.zeros(1 << 24, device="cuda"))
        x.grad = torch.ones_like(x)
        optimizer, taken = torch.optim.SGD([x]), []
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(10):
                x.grad.mul_(2)
            optimizer.step()
        for _ in range(1500):
            begin = time.perf_counter()
            graph.replay()
            taken.append(time.perf_counter() - begin)
        print(json.dumps({"taken": taken}))

    ended = simulate(_ONE, script)
    forecast, taken = ended.numbers["iteration_time"], ended.lines[0]["taken"]
    assert max(taken[:1000]) < forecast / 10
    assert taken[-100:] == pytest.approx([forecast] * 100, rel=1e-3)


def test_at_each_launch_no_more_than_1024_others_are_pending(tmp_path: Path) -> None:
    def script():
        x = nn.Parameter(torch.zeros(1 << 24, device="cuda"))
        optimizer = torch.optim.SGD([x])
        for _ in range(3):
            with torch.no_grad():
                for _ in range(2000):
                    x.mul_(2)
            x.grad = torch.ones_like(x)
            optimizer.step()

    trace = tmp_path / "trace.json"
    simulate(_ONE, script, options=("--trace", trace))
    events = json.loads(trace.read_text())["traceEvents"]
    launched = {
        event["args"]["correlation"]: event["ts"] + event["dur"]
        for event in events
        if event.get("cat") == "cuda_runtime" and "correlation" in event["args"]
    }
    kernels = sorted((event["ts"], event) for event in events if event.get("cat") == "kernel")
    ends = [event["ts"] + event["dur"] for _, event in kernels]
    launches = [launched[event["args"]["correlation"]] for _, event in kernels]
    assert len(kernels) > 4000
    late = [launch - end for launch, end in zip(launches[1025:], ends, strict=False)]
    assert min(late) > -0.01


def test_a_host_with_less_than_that_pending_goes_on_though_none_of_it_can_end() -> None:
    def script():
        dist.init_process_group("cpu:gloo,cuda:nccl")
        torch.cuda.set_device(dist.get_rank())
        x, word = torch.ones(1 << 20, device="cuda"), torch.zeros(1)
        for _ in range(3000):
            x.mul_(2)
        if dist.get_rank() == 1:
            dist.recv(word, 0)
        dist.all_reduce(x)
        if dist.get_rank() == 0:
            for _ in range(1000):
                x.mul_(2)
            dist.send(word, 1)

    simulate("dgx-h100:1,ranks=0-1", script, options=("--live", "all"))
