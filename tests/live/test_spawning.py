"""Scripts that start a process for each GPU themselves, and those that mistake the world."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn

from tests.live.command import simulate

THREE = "dgx-h100:1,ranks=0-2"


def spawning():
    import torch.multiprocessing as mp

    def main(rank, world, word):
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
        dist.init_process_group("nccl", rank=rank, world_size=world)
        torch.cuda.set_device(rank)
        model = nn.parallel.DistributedDataParallel(nn.Linear(10, 10).to(rank), device_ids=[rank])
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            model(torch.randn(20, 10).to(rank)).sum().backward()
            optimizer.step()
        print(json.dumps({"rank": rank, "word": word}) + "\n", end="", flush=True)
        dist.destroy_process_group()

    if __name__ == "__main__":
        world = int(sys.argv[1]) if sys.argv[1:] else torch.cuda.device_count()
        mp.spawn(main, args=(world, "here"), nprocs=world, join=True)


@pytest.mark.smoke
def test_a_rank_is_the_process_that_is_spawned_for_its_gpu() -> None:
    ended, folded = simulate(THREE, spawning, options=("--live", "all")), simulate(THREE, spawning)
    assert sorted((line["rank"], line["word"]) for line in ended.lines) == [(rank, "here") for rank in range(3)]
    assert folded.numbers["iteration_time"] == ended.numbers["iteration_time"]


def test_another_number_of_processes_than_gpus_and_a_world_of_one_server_alone_are_refused() -> None:
    refusal = "torch.multiprocessing.spawn nprocs: 2 is not one process for each of the server's 3"
    assert refusal in simulate(THREE, spawning, 2, status=1).err
    refusal = "init_process_group world_size: 2 is not the job's 4; name a --cluster of 2 GPUs"
    assert refusal in simulate("dgx-a100:2,ranks=0-1+8-9", spawning, status=1).err


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize("work", ["train", "move", "prepare"])
def test_processes_of_the_scripts_own_are_refused_a_gpu_and_left_alone_without(method: str, work: str) -> None:
    def script():
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
            works = {"train": train, "move": move, "prepare": prepare}
            processes = [mp.Process(target=works[sys.argv[2]], args=(rank, answers)) for rank in range(2)]
            for process in processes:
                process.start()
            if sys.argv[2] == "prepare":
                print(answers.get(), answers.get())
            for process in processes:
                process.join()
            weight = nn.Parameter(torch.ones(1, device="cuda"))
            weight.sum().backward()
            torch.optim.SGD([weight]).step()
            sys.exit(max(process.exitcode for process in processes))

    ended = simulate("dgx-h100:1,ranks=0-1", script, method, work, status=int(work != "prepare"))
    if work == "prepare":
        assert "42.0 42.0" in ended.out
    else:
        assert re.search(r"multiprocessing.Process: '.*script.py:\d+' starts a process that uses a GPU", ended.err)
    told = "a process that the script started was refused, see its error" in ended.err
    assert told == (work != "prepare")


def test_a_script_that_calls_deepspeeds_launcher_runs_what_it_would_launch(tmp_path: Path) -> None:
    package = tmp_path / "deepspeed/launcher"  # as DeepSpeed's, whose launcher starts processes
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "runner.py").write_text("def main(args=None):\n    raise RuntimeError('starts processes')\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, torch\nprint(__name__, os.environ['RANK'], sys.argv[1:])\n"
        "weight = torch.nn.Parameter(torch.ones(4, device='cuda'))\nweight.sum().backward()\n"
        "torch.optim.SGD([weight]).step()\n"
    )
    launcher = tmp_path / "launch.py"
    launcher.write_text(
        "from deepspeed.launcher.runner import main\n"
        f"main(['--num_gpus', '3', {str(script)!r}, '--lr', '1'])\nprint('end')\n"
    )
    ended = simulate(THREE, launcher, options=("--live", "all"))
    for rank in range(3):
        assert f"__main__ {rank} ['--local_rank={rank}', '--lr', '1']" in ended.out
    assert ended.out.count("end\n") == 3
    assert ended.err.count("train.py runs in place of DeepSpeed's launcher") == 1
