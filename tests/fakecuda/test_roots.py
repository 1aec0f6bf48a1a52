"""Collectives whose root is not executed: who stands for it gives what it has."""

from __future__ import annotations

from pathlib import Path

from tests.fakecuda.simulated import simulated


def test_a_broadcast_of_a_represented_rank(tmp_path: Path) -> None:
    simulated(
        tmp_path,
        """
        last = dist.get_world_size() - 1
        tensor = torch.tensor([3.0, 4.0], device="cuda")
        for _ in range(2):
            dist.broadcast(tensor, src=last)
            assert tensor.tolist() == [3.0, 4.0]
        objects = [{"lr": 0.1}, "abc"]
        dist.broadcast_object_list(objects, src=last)
        assert objects == [{"lr": 0.1}, "abc"]
        objects = ["of the first"] if dist.get_rank() == 0 else [None]
        dist.broadcast_object_list(objects, src=0)
        assert objects == ["of the first"]
        large = torch.empty(1 << 20, device="cuda")
        dist.broadcast(large, src=last)
        """,
        cluster="dgx-h100:2",
    )
