"""The memory that a forecast tells of is the most that the run needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.live.device.simulated import simulated


def needed(folder: Path, script: str, cluster: str = "H100") -> dict[str, Any]:
    numbers = folder / "numbers.json"
    simulated(folder, script, "--live", "1", "--json", str(numbers), cluster=cluster)
    return json.loads(numbers.read_text())["ranks"][0]["memory"]


def test_peak_stays_when_the_script_resets_its_own(tmp_path: Path) -> None:
    memory = needed(
        tmp_path,
        """
    big = torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
    del big
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() < 1 << 20
    """,
    )
    assert memory["allocated"] == memory["reserved"] == memory["breakdown"]["activations"] == 3 << 30


def test_the_gpu_that_needs_most_counts(tmp_path: Path) -> None:
    memory = needed(
        tmp_path, """big = torch.empty(20 << 30, dtype=torch.uint8, device="cuda:1")""", "dgx-h100:1,ranks=0-1"
    )
    assert memory["reserved"] == 20 << 30
