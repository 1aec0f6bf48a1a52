"""Checkpoints of scripts: their bytes against the parameters', the time they take, and the steps that they are in."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn

from foretrain.live.event_log import CHECKPOINT, STREAM
from foretrain.live.rank_trace import Save
from tests.live.command import simulate
from tests.live.player import play

LAYER = 4 * (512 * 512 + 512)
"""Bytes of a Linear(512, 512)."""


def checkpoints(found: Any) -> list[tuple[int, int, int]]:
    return [(one["after_step"], one["size"], one["largest"]) for one in found.numbers["checkpoints"]]


def test_a_save_takes_no_time_that_the_gpu_took_before() -> None:
    def program(rank):
        rank.step(1, rank.record(0))
        rank.run(0, 100)
        before, begin = rank.record(0), rank.clock
        rank.run(0, 30)
        yield rank.ask(STREAM)
        rank.note(CHECKPOINT, a=begin, b=before, payload=json.dumps(["save", "file:1", [[0, 8], [2, 4]]]).encode())
        rank.step(2, rank.record(0))

    assert play(program).trace.rank_traces[0].saves == [Save(1, "save", "file:1", ((0, 8), (2, 4)), 30)]


def test_torch_save_writes_each_storage_once_and_takes_the_copies_to_the_host(tmp_path: Path) -> None:
    def script():
        torch.cuda.set_device(0)
        model = nn.Linear(512, 512, device="cuda")
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(6):
            model(torch.ones(1 << 20, 512, device="cuda")).sum().backward()
            optimizer.step()
            if step == 4:
                torch.save(torch.ones(1), sys.argv[1] + "/loss.pt")
            if step == 3:
                begin = torch.cuda.Event(enable_timing=True)
                begin.record()
                torch.save({"model": model.state_dict(), "weight": model.weight, "step": step}, sys.argv[1] + "/a.pt")
                torch.save(optimizer.state_dict(), sys.argv[1] + "/b.pt")
                end = torch.cuda.Event(enable_timing=True)
                end.record()
                print(json.dumps({"seconds": begin.elapsed_time(end) / 1e3}))

    found = simulate("H100", script, tmp_path)
    (one,) = found.numbers["checkpoints"]
    # Adam's two moments, and a step of 4 bytes for each parameter
    assert checkpoints(found) == [(4, 3 * LAYER + 8, 3 * LAYER + 8)]
    assert all(call.startswith("torch.save at ") for call in one["calls"])
    assert len(one["calls"]) == 2
    assert one["seconds"] == pytest.approx(found.lines[0]["seconds"], rel=0.05)
    assert not one["partial"]
    (rank,) = found.numbers["ranks"]
    assert rank["steady_steps"] == 3, "steps 3, 4 and 6"
    assert rank["steps"][4] > rank["steps"][3]
    assert found.numbers["iteration_time"] == pytest.approx(rank["steps"][3], rel=0.01)
    assert "after step 4: 3.15 MB by all ranks" in " ".join(found.out.split())


def test_distributed_checkpoints_are_divided_among_all_ranks(tmp_path: Path) -> None:
    def script():
        from torch.distributed.checkpoint.state_dict_saver import async_save, save
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("cpu:gloo,cuda:nccl")
        torch.cuda.set_device(dist.get_rank())
        model = nn.Linear(512, 512).cuda()
        if sys.argv[2] == "sharded":
            fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters())
        for step in range(4):
            model(torch.ones(64, 512, device="cuda")).sum().backward()
            optimizer.step()
            if step == 1:
                save({"model": model.state_dict()}, checkpoint_id=sys.argv[1] + "/1")
            if step == 2:
                async_save({"model": model.state_dict()}, checkpoint_id=sys.argv[1] + "/2")

    for way in ("sharded", "replicated"):
        for live in ("auto", "all"):
            found = simulate("dgx-h100:1,ranks=0-1", script, tmp_path / way / live, way, options=("--live", live))
            first, second = found.numbers["checkpoints"]
            assert first["size"] == second["size"] == LAYER
            assert first["seconds"] > 0
            assert "checkpoint.save at" in first["calls"][0]
            assert "checkpoint.async_save at" in second["calls"][0]
            # One of the ranks cannot write less than the weight, where tensors are whole.
            whole = live == "all" and way == "replicated"
            assert first["largest"] == (4 * 512 * 512 if whole else LAYER // 2)


def test_a_file_that_no_live_rank_has_written_is_named(tmp_path: Path) -> None:
    def script():
        rank, ranks = dist.get_rank(), dist.get_world_size()
        weight = torch.ones(4, device="cuda")
        torch.save(weight, f"{sys.argv[1]}/{rank}.pt")
        dist.barrier()
        torch.load(f"{sys.argv[1]}/{(rank + 1) % ranks}.pt")

    failed = simulate("dgx-h100:1,ranks=0-1", script, tmp_path, status=1).err
    assert "foretrain: the script failed on rank 0 with exit status 1\n" in failed
    assert f"foretrain: there is no file '{tmp_path}/1.pt', and the rank that would write it may be folded" in failed
    assert failed.rstrip().endswith("run all with --live all")
    simulate("dgx-h100:1,ranks=0-1", script, tmp_path, options=("--live", "all"))


def test_what_represented_ranks_save_in_files_is_said_to_be_unknown(tmp_path: Path) -> None:
    def script():
        from safetensors.torch import save_file

        model = nn.Linear(512, 512, device="cuda")
        optimizer = torch.optim.SGD(model.parameters())
        for step in range(3):
            model(torch.ones(64, 512, device="cuda")).sum().backward()
            optimizer.step()
            if step == 1:
                save_file(model.state_dict(), sys.argv[1] + f"/{dist.get_rank()}.safetensors")

    pytest.importorskip("safetensors")
    found = simulate("dgx-h100:1,ranks=0-1", script, tmp_path)
    assert checkpoints(found) == [(2, LAYER, LAYER)]
    assert found.numbers["checkpoints"][0]["partial"]
    assert "by the live ranks" in " ".join(found.out.split())
    assert "every step that counts contains a checkpoint" in found.out
