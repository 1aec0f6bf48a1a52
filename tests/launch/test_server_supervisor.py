"""``foretrain run --servers`` and ``foretrain server``: real processes that train over a parameter server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.launch.test_run import ENDLESS, ENVIRONMENT, TRAIN, torchrun
from tests.processes import started

SECRET = {"FORETRAIN_SECRET": bytes(range(32)).hex()}


def foretrain(*words: str) -> list[str]:
    return [sys.executable, "-m", "foretrain", *words]


def running(folder: Path) -> list[str]:
    """Command lines of processes that were started with ``folder`` as theirs."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(path / "cwd") == str(folder) and "Z" not in (path / "stat").read_text().split(")")[1][:3]:
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def serving(folder: Path) -> set[int]:
    """Process ids of the servers among them."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(path / "cwd") == str(folder) and b"foretrain\0server" in (path / "cmdline").read_bytes():
                found.add(int(path.name))
        except OSError:
            continue
    return found


def until(ready: Callable[[], bool], timeout: float = 120.0) -> None:
    deadline = time.monotonic() + timeout
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "neighbour.py").write_text("WIDTH = 16\n")
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "endless.py").write_text(ENDLESS)
    return tmp_path


def test_a_script_of_one_model_trains_to_the_same_bits_over_servers(folder):
    one = TRAIN.replace(
        "digests = [train(DDP(network()), steps), train(other, steps)]", "digests = [train(other, steps)]"
    )
    (folder / "train.py").write_text(one.replace("    other.register_comm_hook(None, hook)\n", ""))
    theirs = torchrun(folder, "train.py", "--steps", "8")
    command = foretrain("run", "--nproc", "2", "--servers", "2", "--schedule", "p3", "--", "train.py", "--steps", "8")
    taken = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert taken.returncode == 0, taken.stderr
    assert taken.stdout == theirs.stdout
    assert "DistributedDataParallel under p3" in taken.stderr or "Sequential under p3" in taken.stderr
    assert "rejected" not in taken.stderr
    assert not running(folder)


CLIPS = "        nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
"""What reads gradients, which servers have updated with by then."""


@pytest.mark.parametrize("consistency", ["bsp", "ssp(1)"])
def test_a_script_whose_optimizer_runs_on_the_servers(folder, consistency):
    one = TRAIN.replace(
        "digests = [train(DDP(network()), steps), train(other, steps)]", "digests = [train(other, steps)]"
    )
    (folder / "train.py").write_text(one.replace("    other.register_comm_hook(None, hook)\n", "").replace(CLIPS, ""))
    theirs = torchrun(folder, "train.py", "--steps", "8") if consistency == "bsp" else None
    where = ["--servers", "1", "--consistency", consistency, *(["--updates", "servers"] if theirs else [])]
    command = foretrain("run", "--nproc", "2", *where, "--", "train.py", "--steps", "8")
    taken = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert taken.returncode == 0, taken.stderr
    assert theirs is None or taken.stdout == theirs.stdout
    assert "under bytescheduler" in taken.stderr
    assert "rejected" not in taken.stderr
    assert not running(folder)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.smoke_case("15")
def test_no_server_outlives_the_command(folder, end):
    command = foretrain("run", "--nproc", "2", "--servers", "2", "--", "endless.py", str(folder))
    with started(command, cwd=folder, env=ENVIRONMENT, stderr=subprocess.DEVNULL) as process:
        until(lambda: all((folder / rank).exists() for rank in "01"))
        assert sum("foretrain server" in line for line in running(folder)) == 2
        process.send_signal(end)
        process.wait(30)
    until(lambda: not running(folder))


def test_a_server_that_dies_is_started_again_and_not_for_ever(folder):
    command = foretrain("run", "--nproc", "2", "--servers", "2", "--server-restarts", "1", "--", "endless.py")
    said = folder / "said"
    with (
        open(said, "w") as errors,
        started([*command, str(folder)], cwd=folder, env=ENVIRONMENT, stderr=errors) as process,
    ):
        until(lambda: all((folder / rank).exists() for rank in "01"))
        first = serving(folder)
        assert len(first) == 2
        os.kill(min(first), signal.SIGKILL)
        until(lambda: len(serving(folder) - {min(first)}) == 2)
        address = r"at 127\.0\.0\.1:\d+ was killed by SIGKILL"
        assert re.search(rf"foretrain: server \d {address}; it is started again \(1 of 1 times\)\n", said.read_text())
        # The ranks go on: in the next round they need it.
        until(lambda: "all push again" in said.read_text())
        assert process.poll() is None
        os.kill(max(serving(folder)), signal.SIGKILL)
        assert process.wait(30) == 2
    last = said.read_text()
    assert re.search(rf"foretrain: server \d {address}, and --server-restarts 1 allows no more\n", last)
    assert "PeerLost" not in last
    until(lambda: not running(folder))


def test_servers_of_their_own(folder):
    environment = ENVIRONMENT | SECRET
    server = foretrain("server", "--address", "127.0.0.1:0", "--workers", "2")
    with started(server, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("server 0 of 1 for 2 workers listens on 127.0.0.1:")
            command = foretrain("run", "--nproc", "2", "--servers", line.split()[-1], "--", "train.py", "--steps", "6")
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            # Two models at once: the second finds the servers taken, and trains with PyTorch's own.
            two = TRAIN.replace("    other.register_comm_hook(None, hook)\n", "    first = DDP(network())\n")
            two = two.replace("train(DDP(network()), steps), train(other", "train(first, steps), train(other")
            (folder / "train.py").write_text(two)
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            assert "the job's servers serve one model" in done.stderr
        finally:
            process.terminate()
        assert process.wait(60) == 143


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["server", "--address", "0.0.0.0:0", "--workers", "2"], "means every address of this host"),
        (["server", "--address", "nowhere", "--workers", "2"], "address: 'nowhere' is no address and port"),
        (["server", "--address", "127.0.0.1:0", "--workers", "0"], "workers: 0 is no number of workers"),
        (["server", "--address", "127.0.0.1:0", "--workers", "2", "--shard", "2"], "shard: 2 is none of 1 servers"),
        (
            ["server", "--address", "127.0.0.1:0", "--workers", "2", "--timeout", "0s"],
            "timeout: '0s' is no time to wait",
        ),
        (["run", "--servers", "1", "--snapshot-dir", "x", "--", "train.py"], "snapshot-dir: 'x' is of no use to what"),
        (["run", "--servers", "0", "--", "train.py"], "servers: 0 is no number of servers to start"),
        (["run", "--servers", "2", "--server-restarts", "-1", "--", "train.py"], "server-restarts: -1 is no number"),
        (["run", "--updates", "servers", "--", "train.py"], "updates: 'servers' is of no use to all-reduce"),
        (["run", "--consistency", "async", "--", "train.py"], "consistency: 'async' is of no use to all-reduce"),
        (["run", "--servers", "1", "--consistency", "some", "--", "train.py"], "consistency: 'some' is unknown"),
        (
            ["run", "--servers", "1", "--updates", "workers", "--consistency", "async", "--", "train.py"],
            "consistency: 'async' cannot be with optimizers on the workers",
        ),
        (["run", "--servers", "2", "--elastic", "--", "train.py"], "elastic: '2' would end with any rank of this node"),
        (["run", "--servers", "2", "--nnodes", "2", "--", "train.py"], "loopback device of one of 2 nodes"),
    ],
)
def test_what_is_wrong_is_said(folder, words, said):
    done = subprocess.run(
        foretrain(*words), cwd=folder, env=ENVIRONMENT | SECRET, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert said in done.stderr


def test_no_server_without_a_secret(folder):
    environment = {key: value for key, value in ENVIRONMENT.items() if key not in SECRET}
    command = foretrain("server", "--address", "127.0.0.1:0", "--workers", "2")
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "nobody is let in without a secret" in done.stderr
