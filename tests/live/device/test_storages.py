"""Storages and checkpoints on simulated GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.device.simulated import simulated


def test_saved_tensors_load_with_the_values_they_have(tmp_path: Path) -> None:
    simulated(
        tmp_path,
        """
        path = os.path.join(os.path.dirname(__file__), "saved")
        small, large = torch.arange(5, device="cuda"), torch.empty(1 << 20, device="cuda")
        torch.save({"small": small, "large": large}, path)
        loaded = torch.load(path, map_location="cuda")
        assert loaded["small"].tolist() == [0, 1, 2, 3, 4] and loaded["large"].shape == large.shape
        before = torch.cuda.memory_allocated()
        storage = torch.UntypedStorage(1 << 20, device="cuda")
        assert torch.cuda.memory_allocated() - before == 1 << 20 and storage.device == torch.device("cuda", 0)
        """,
    )


def test_values_stay_in_a_storage_that_grows(tmp_path: Path) -> None:
    simulated(
        tmp_path,
        """
        tensor = torch.tensor([1, 2, 3], dtype=torch.uint8, device="cuda")
        tensor.resize_(100_000)
        assert tensor[:3].tolist() == [1, 2, 3]
        told = [None]
        objects = [list(range(10_000 * k)) for k in range(8)]
        dist.scatter_object_list(told, objects if dist.get_rank() == 0 else None, src=0)
        assert told[0] == objects[dist.get_rank()]
        """,
        "--live",
        "2",
    )


@pytest.mark.smoke
def test_a_represented_world_writes_and_reads_distributed_checkpoints(tmp_path: Path) -> None:
    simulated(
        tmp_path,
        """
        import torch.distributed.checkpoint as checkpoint
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
        from torch.distributed.fsdp import fully_shard
        model = torch.nn.Linear(64, 64, device="cuda")
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 64, device="cuda")).sum().backward()
        optimizer.step()
        path = os.path.join(os.path.dirname(__file__), "checkpoint")
        parameters, moments = get_state_dict(model, optimizer)
        state = {"model": parameters, "optimizer": moments, "step": 7}
        checkpoint.async_save(state, checkpoint_id=path, process_group=dist.new_group(backend="gloo")).result()
        state["step"] = 0
        checkpoint.load(state, checkpoint_id=path)
        assert state["step"] == 7
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        """,
    )
