"""Values of ranks that are not executed are those of who stands for them."""

from __future__ import annotations

from pathlib import Path

from tests.live.device.simulated import simulated


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


def test_every_represented_rank_has_the_value_of_its_own_kind(tmp_path: Path) -> None:
    # Odd ranks are like rank 1, even ones like rank 0: neither stands for just those behind it.
    simulated(
        tmp_path,
        """
        mesh = dist.device_mesh.init_device_mesh("cuda", (4, 2), mesh_dim_names=("data", "stage"))
        stage = mesh.get_local_rank("stage")
        pair = mesh.get_group("stage")
        token = torch.ones(4, device="cuda")
        if stage == 0:
            dist.send(token, group=pair, group_dst=1)
        else:
            dist.recv(token, group=pair, group_src=0)
        mine = torch.tensor([10.0 + stage], device="cuda")
        everyone = torch.zeros(8, device="cuda")
        dist.all_gather_into_tensor(everyone, mine)
        assert everyone.tolist() == [10.0, 11.0] * 4, everyone.tolist()
        for root in range(8):
            value = mine.clone()
            dist.broadcast(value, src=root)
            assert value.item() == 10.0 + root % 2
        """,
    )
