"""CUDA graphs on simulated GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.live.device.simulated import simulated


def test_a_replayed_graph_takes_the_kernels_time_and_one_launch(tmp_path: Path) -> None:
    simulated(
        tmp_path,
        """
        import time
        x, other = torch.ones(64, 64, device="cuda"), torch.cuda.Stream()

        def work():
            total = torch.zeros(1 << 24, device="cuda")
            for _ in range(100):
                x.add_(1)
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                total.add_(1)
                dist.all_reduce(total)
            torch.cuda.current_stream().wait_stream(other)

        def taken(call):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            host = time.perf_counter() - begin
            torch.cuda.synchronize()
            return host, time.perf_counter() - begin

        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            assert torch.cuda.is_current_stream_capturing()
            work()
            try:
                x.sum().item()
            except RuntimeError as error:
                assert "capturing" in str(error)
            else:
                raise AssertionError
        host, both = taken(work)
        replayed_host, replayed = taken(graph.replay)
        assert replayed_host < host / 20
        assert 0 < replayed < both
        assert abs(taken(graph.replay)[1] - replayed) < 1e-9
        """,
    )


@pytest.mark.smoke
def test_graphed_callables_train(tmp_path: Path) -> None:
    simulated(
        tmp_path,
        """
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).cuda()
        graphed = torch.cuda.make_graphed_callables(model, (torch.randn(64, 512, device="cuda", requires_grad=True),))
        graphed(torch.randn(64, 512, device="cuda", requires_grad=True)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        """,
    )


def test_steps_in_a_graph_are_made_when_it_is_replayed(tmp_path: Path) -> None:
    told = tmp_path / "forecast.json"
    simulated(
        tmp_path,
        """
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(64, 512, device="cuda")

        def step():
            optimizer.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            optimizer.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(7):
            graph.replay()
        """,
        "--json",
        str(told),
        cluster="H100",
    )
    numbers = json.loads(told.read_text())
    (rank,) = numbers["ranks"]
    assert len(rank["steps"]) == 3 + 7
    assert 0 < rank["steps"][-1] < 0.9 * rank["steps"][1]  # one launch, where there were dozens
    assert rank["flops"] > 0


def test_several_steps_in_one_graph_are_taken_for_one_and_said_so(tmp_path: Path) -> None:
    ended = simulated(
        tmp_path,
        """
        weight = torch.nn.Parameter(torch.ones(1 << 20, device="cuda"))
        optimizer = torch.optim.SGD([weight])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(2):
                weight.grad = torch.ones_like(weight)
                optimizer.step()
        for _ in range(3):
            graph.replay()
        """,
        cluster="H100",
    )
    assert "an optimizer makes several steps is" in ended.stdout
