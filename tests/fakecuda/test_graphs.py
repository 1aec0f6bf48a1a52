"""CUDA graphs on simulated GPUs."""

from __future__ import annotations

from pathlib import Path

from tests.fakecuda.simulated import simulated


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
