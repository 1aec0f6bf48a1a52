"""Groups that only their members make: what represented ranks send in theirs is known as far as the script tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.command import Ended, simulate

pytestmark = pytest.mark.usefixtures("device")

PAIRS = """
import os, sys
import torch
import torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank = dist.get_rank()
for first in range(0, dist.get_world_size(), 2):
    mine = rank in (first, first + 1)
    if mine or sys.argv[1] != "own":
        made = dist.new_group([first, first + 1], use_local_synchronization=sys.argv[1] != "all members wait")
        group = made if mine else group if rank >= first else None
x = torch.nn.Parameter(torch.zeros(1 << 24, device="cuda"))
optimizer = torch.optim.SGD([x])
for _ in range(3):
    x.grad = torch.ones_like(x)
    dist.all_reduce(x.grad, group=group)
    optimizer.step()
"""


def pairs(folder: Path, way: str) -> Ended:
    path = folder / "pairs.py"
    path.write_text(PAIRS, encoding="utf-8")
    ended = simulate("dgx-h100:1", path, way)
    assert ended.status == 0, ended.err
    assert ended.numbers["live"] == [0]
    return ended


def test_groups_of_others_are_known_where_all_ranks_name_them(tmp_path: Path) -> None:
    named, plain = pairs(tmp_path, "all"), pairs(tmp_path, "all members wait")
    assert named.numbers["links"] == plain.numbers["links"]
    assert "new_group" not in named.out + named.err


def test_those_that_only_others_name_are_warned_of(tmp_path: Path) -> None:
    ended = pairs(tmp_path, "own")
    assert (ended.out + ended.err).count("new_group(use_local_synchronization=True) has told of a group") == 1
