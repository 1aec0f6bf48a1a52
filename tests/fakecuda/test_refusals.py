"""Mistakes that a GPU refuses, in PyTorch's words."""

from __future__ import annotations

from pathlib import Path

from tests.fakecuda.simulated import simulated

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
