"""Scripts that start a process for each GPU themselves, and those that mistake the world."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.command import Ended, simulate

pytestmark = pytest.mark.usefixtures("device")

SPAWNING = """\
import json, os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def main(rank, world, word):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
    dist.init_process_group("nccl", rank=rank, world_size=world)
    torch.cuda.set_device(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 10).to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        model(torch.randn(20, 10).to(rank)).sum().backward()
        optimizer.step()
    print(json.dumps({"rank": rank, "word": word}) + "\\n", end="", flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    world = int(sys.argv[1]) if sys.argv[1:] else torch.cuda.device_count()
    mp.spawn(main, args=(world, "here"), nprocs=world, join=True)
"""


def spawning(folder: Path) -> Path:
    script = folder / "spawning.py"
    script.write_text(SPAWNING, encoding="utf-8")
    return script


@pytest.mark.smoke
def test_a_rank_is_the_process_that_is_spawned_for_its_gpu(tmp_path: Path) -> None:
    ended = simulate("dgx-h100:1,ranks=0-2", spawning(tmp_path), options=("--live", "all"))
    assert ended.status == 0, ended.err
    assert sorted(line["rank"] for line in ended.lines) == [0, 1, 2]
    assert {line["word"] for line in ended.lines} == {"here"}
    folded = simulate("dgx-h100:1,ranks=0-2", spawning(tmp_path))
    assert folded.numbers["iteration_time"] == ended.numbers["iteration_time"]


def test_another_number_of_processes_than_gpus_is_refused(tmp_path: Path) -> None:
    ended = simulate("dgx-h100:1,ranks=0-2", spawning(tmp_path), 2)
    assert ended.status == 1
    assert "torch.multiprocessing.spawn nprocs: 2 is not one process for each of the server's 3" in ended.err


def test_a_world_of_its_own_servers_gpus_alone_is_refused(tmp_path: Path) -> None:
    ended = simulate("dgx-a100:2,ranks=0-1+8-9", spawning(tmp_path))
    assert ended.status == 1
    assert "init_process_group world_size: 2 is not the job's 4; name a --cluster of 2 GPUs" in ended.err


STARTING = """\
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def train(rank, answers):
    dist.init_process_group("nccl", init_method="tcp://localhost:12356", rank=rank, world_size=2)

def move(rank, answers):
    torch.ones(1).cuda()

def prepare(rank, answers):
    answers.put(torch.full((2,), 21.0).sum().item())

if __name__ == "__main__":
    mp.set_start_method(sys.argv[1])
    answers = mp.Queue()
    processes = [mp.Process(target=globals()[sys.argv[2]], args=(rank, answers)) for rank in range(2)]
    for process in processes:
        process.start()
    if sys.argv[2] == "prepare":
        print(answers.get(), answers.get())
    for process in processes:
        process.join()
    weight = torch.nn.Parameter(torch.ones(1, device="cuda"))
    weight.sum().backward()
    torch.optim.SGD([weight]).step()
    sys.exit(max(process.exitcode for process in processes))
"""


def starting(folder: Path, *arguments: str) -> Ended:
    script = folder / "starting.py"
    script.write_text(STARTING, encoding="utf-8")
    return simulate("dgx-h100:1,ranks=0-1", script, *arguments)


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize("work", ["train", "move"])
def test_processes_of_the_scripts_own_are_refused_a_gpu(tmp_path: Path, method: str, work: str) -> None:
    ended = starting(tmp_path, method, work)
    assert ended.status == 1
    assert f"multiprocessing.Process: '{tmp_path}/starting.py:20' starts a process that uses a GPU" in ended.err


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_those_that_need_none_are_left_alone(tmp_path: Path, method: str) -> None:
    ended = starting(tmp_path, method, "prepare")
    assert ended.status == 0, ended.err
    assert "42.0 42.0" in ended.out
