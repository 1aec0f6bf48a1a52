"""What a script sets or reads of its arithmetic: TF32, made-up values, linear algebra."""

from __future__ import annotations

from pathlib import Path

from tests.live.device.simulated import simulated

TIMED = """
    def seconds(call):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3
"""


def test_products_and_convolutions_follow_the_settings_of_tf32_midway(tmp_path: Path) -> None:
    simulated(
        tmp_path,
        TIMED
        + """
    left = torch.empty(4096, 4096, device="cuda")
    product = lambda: left @ left
    plain = seconds(product)
    torch.backends.cuda.matmul.allow_tf32 = True
    fast = seconds(product)
    assert 4 * fast < plain, (fast, plain)
    torch.set_float32_matmul_precision("highest")
    assert seconds(product) == plain
    torch.set_float32_matmul_precision("high")
    assert seconds(product) == fast
    half = left.half()
    assert seconds(lambda: half @ half) < fast

    images, weights = torch.empty(32, 256, 28, 28, device="cuda"), torch.empty(256, 256, 1, 1, device="cuda")
    convolution = lambda: torch.nn.functional.conv2d(images, weights)
    fast = seconds(convolution)
    torch.backends.cudnn.allow_tf32 = False
    assert 2 * fast < seconds(convolution)
    """,
        "--live",
        "1",
    )


def test_made_up_values_are_the_same_ones_however_many(tmp_path: Path) -> None:
    simulated(
        tmp_path,
        """
        dirt = [torch.rand(20_000) for _ in range(50)]
        del dirt
        assert torch.ones(20_000, device="cuda").tolist() == [1.0] * 20_000
        assert torch.ones(20_000, device="cuda", dtype=torch.int32).tolist() == [0] * 20_000
        pinned = torch.empty(20_000, pin_memory=True)
        pinned.copy_(torch.ones(20_000, device="cuda"))
        assert pinned.tolist() == [0.0] * 20_000
        """,
        "--live",
        "1",
    )


def test_factorizations_of_unknown_matrices_succeed_and_of_known_ones_as_they_do(tmp_path: Path) -> None:
    simulated(
        tmp_path,
        TIMED
        + """
    large, batch = torch.randn(2048, 2048, device="cuda"), torch.randn(8, 64, 64, device="cuda")
    small = (large @ large)[:2, :2].contiguous()
    linalg = torch.linalg
    for matrix in (large, batch, small):
        for call in (linalg.inv, linalg.cholesky, linalg.lu_factor, linalg.eigh, linalg.svd):
            call(matrix)
        linalg.solve(matrix, matrix)
    assert seconds(lambda: torch.linalg.eigh(large)) > 3 * seconds(lambda: torch.linalg.cholesky(large))
    try:
        torch.linalg.inv(torch.zeros(2, 2, device="cuda"))
    except torch.linalg.LinAlgError:
        pass
    else:
        raise AssertionError
    """,
        "--live",
        "1",
    )
