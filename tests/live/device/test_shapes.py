"""Operators that only GPUs have, and whose shapes PyTorch cannot tell."""

from __future__ import annotations

from pathlib import Path

from tests.live.device.simulated import simulated


def test_operators_of_gpus_alone_train(tmp_path: Path) -> None:
    simulated(
        tmp_path,
        """
        x = torch.randn(16, 8, 32, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        norm = torch.nn.SyncBatchNorm(8, device="cuda")
        norm(x).sum().backward()
        assert x.grad.shape == x.shape and norm.weight.grad.shape == (8,)
        gru = torch.nn.GRU(32, 64, batch_first=True, device="cuda")
        output, last = gru(torch.randn(16, 5, 32, device="cuda"))
        assert output.shape == (16, 5, 64) and last.shape == (1, 16, 64)
        output.sum().backward()
        assert all(p.grad.shape == p.shape for p in gru.parameters())
        scores = torch.randn(50, 300, 20, device="cuda", requires_grad=True)
        lengths = torch.full((300,), 50), torch.full((300,), 10)
        targets = torch.randint(1, 20, (300, 10), device="cuda")
        torch.nn.functional.ctc_loss(scores.log_softmax(-1), targets, *lengths).backward()
        assert scores.grad.shape == scores.shape
        gloo = dist.new_group(backend="gloo")
        dist.monitored_barrier(gloo)
        """,
    )


def test_float8_products_into_a_given_tensor(tmp_path: Path) -> None:
    simulated(
        tmp_path,
        """
        a, b = (torch.randn(64, 32, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
        scale, out = torch.ones((), device="cuda"), torch.empty(64, 64, device="cuda", dtype=torch.bfloat16)
        found = torch._scaled_mm(a, b.t(), scale_a=scale, scale_b=scale, out_dtype=out.dtype, out=out)
        assert found is out and out.shape == (64, 64)
        """,
    )
