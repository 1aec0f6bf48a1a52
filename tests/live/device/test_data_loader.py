"""Data that comes from other processes."""

import json
from pathlib import Path

import pytest

from tests.live.device.simulated import simulated


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_that_cost_nothing_are_told_once(tmp_path: Path, workers: int) -> None:
    numbers = tmp_path / "numbers.json"
    simulated(
        tmp_path,
        f"""
        from torch.utils.data import DataLoader
        for _ in range(2):
            for batch in DataLoader(range(8), num_workers={workers}):
                batch.cuda()
        """,
        *("--json", str(numbers)),
    )
    told = json.loads(numbers.read_text())["warnings"]
    found = {text: count for text, count in told.items() if "workers" in text}
    assert list(found.values()) == [1] * bool(workers)
    assert all("script.py:" in text for text in found)
