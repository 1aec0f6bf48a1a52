"""``foretrain run`` beside the script alone: a real launcher, real processes, two ranks on the loopback device."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.examples.torchrun import forked
from tests.launch.forked import foretrain_run, running
from tests.processes import finished
from tests.waiting import until

EXAMPLE = Path(__file__).parents[2] / "examples" / "07_train.py"

TRAIN = """
import argparse, hashlib, os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from neighbour import WIDTH

def hook(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])

def network():
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, WIDTH))

def train(model, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        with model.no_sync():
            model(torch.randn(8, WIDTH)).square().mean().backward()
        model(torch.randn(8, WIDTH)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in model.state_dict().values())).hexdigest()

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--steps", type=int)
    steps = arguments.parse_args().steps
    other = DDP(network())
    other.register_comm_hook(None, hook)
    digests = [train(DDP(network()), steps), train(other, steps)]
    if dist.get_rank() == 0:
        print(__name__, sys.argv, sys.path[0] == os.path.dirname(os.path.abspath(__file__)), *digests)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""

FAILING = """
import os, sys, time
from pathlib import Path
sys.stdout.write(f"{__name__} {sys.argv[1:]}\\n")
if os.environ["RANK"] == "1":
    while not Path("written").exists():
        time.sleep(0.01)
    sys.exit(7)
Path("written").touch()
time.sleep(600)
"""

ENDLESS = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10**9):
    optimizer.zero_grad()
    model(torch.randn(8, 8)).sum().backward()
    optimizer.step()
    if step == 8:
        path = Path(sys.argv[1], os.environ["RANK"])
        path.with_suffix(".part").write_text(str(os.getpid()))
        path.with_suffix(".part").rename(path)
"""


def with_scripts(folder: Path) -> Path:
    for name, text in {"neighbour": "WIDTH = 16", "train": TRAIN, "failing": FAILING, "endless": ENDLESS}.items():
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture
def folder(tmp_path):
    return with_scripts(tmp_path)


@pytest.fixture
def temporary(tmp_path_factory, monkeypatch):
    """A folder for temporary files, in which nothing may be left but a cache of PyTorch's."""
    scratch = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(scratch))
    yield
    assert not [name for name in os.listdir(scratch) if not name.startswith("torchinductor_")]


@pytest.mark.usefixtures("temporary")
def test_an_unmodified_script_trains_to_the_same_bits(folder):
    theirs = forked("train.py", "--steps", "8", folder=folder)
    taken = foretrain_run("--schedule", "p3", "--", "train.py", "--steps", "8", folder=folder)
    assert taken.returncode == 0, taken.stderr

    assert theirs.stdout.startswith("__main__ ['train.py', '--steps', '8'] True ")
    assert taken.stdout == theirs.stdout
    said = [line for line in taken.stderr.splitlines() if line.startswith("foretrain: ")]
    assert "the communication hook hook needs PyTorch's reducer" in said[0]
    assert said[1].startswith("foretrain: Sequential with PyTorch's own DistributedDataParallel: 8 steps, median ")
    assert re.match(r"foretrain: Sequential under p3.*: 8 steps, median .*, forecast .* \(.*%\), T\* .*, gap", said[2])
    assert len(said) == 3


@pytest.mark.smoke
def test_the_example(folder):
    taken = foretrain_run("--", EXAMPLE, folder=folder)
    assert taken.returncode == 0, taken.stderr
    assert "points are on the ring" in taken.stdout
    assert sorted(path.stem for path in folder.iterdir()) == ["endless", "failing", "neighbour", "train"]
    assert re.search(r"foretrain: Sequential under bytescheduler.*: 24 steps", taken.stderr)


@pytest.mark.usefixtures("temporary")
def test_the_exit_status_is_the_scripts_and_a_script_without_a_model_runs_as_it_is(folder):
    command = [sys.executable, "-m", "foretrain", "run", "--nproc", "2", "-m", "--", "failing", "--", "-x"]
    ended = finished(command, cwd=folder, timeout=600)
    assert ended.returncode == 7
    assert ended.stdout == "__main__ ['--', '-x']\n" * 2
    assert "rank 1" in ended.stderr
    assert "ended with 7 first" in ended.stderr


def test_no_process_outlives_the_command_that_is_interrupted(folder):
    with running("--", "endless.py", folder, folder=folder) as command:
        pids = [int((folder / rank).read_text()) for rank in "01"]
        os.kill(command.pid, signal.SIGINT)
        ended = command.finished()
    assert ended.returncode == 130
    assert "foretrain: ended by SIGINT" in ended.stderr
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
