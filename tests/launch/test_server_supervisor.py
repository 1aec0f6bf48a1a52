"""``foretrain run --servers`` and ``foretrain server``: real processes that train over a parameter server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.torchrun import forked
from tests.launch.forked import foretrain_run, running
from tests.launch.test_run import TRAIN, with_scripts
from tests.plugins.torch.ranks import QUIET
from tests.processes import descendants, started
from tests.waiting import until


def foretrain(*words: str) -> list[str]:
    return [sys.executable, "-m", "foretrain", *words]


def running_in(folder: Path, word: str = "") -> dict[int, str]:
    """Command lines with ``word``, by id, of processes that were started in ``folder``."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(path / "cwd") == str(folder) and "Z" not in (path / "stat").read_text().split(")")[1][:3]:
                found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return {pid: line for pid, line in found.items() if word in line}


def serving(folder: Path) -> set[int]:
    """Ids of the servers among them."""
    return set(running_in(folder, "foretrain server"))


@pytest.fixture
def folder(tmp_path):
    return with_scripts(tmp_path)


CLIPS = "        nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
"""Reads gradients, which servers have applied by then."""


@pytest.mark.parametrize(
    ("options", "same", "clips"),
    [
        (["--servers", "2"], True, True),
        (["--servers", "1", "--updates", "servers"], True, False),
        (["--servers", "1", "--consistency", "ssp(1)"], False, False),
    ],
    ids=["sums", "updates", "ssp"],
)
def test_a_script_of_one_model_trains_over_servers(folder, options, same, clips):
    one = TRAIN.replace(
        "digests = [train(DDP(network()), steps), train(other, steps)]", "digests = [train(other, steps)]"
    ).replace("    other.register_comm_hook(None, hook)\n", "")
    (folder / "train.py").write_text(one if clips else one.replace(CLIPS, ""))
    taken = foretrain_run(*options, "--schedule", "p3", "--", "train.py", "--steps", "8", folder=folder)
    assert taken.returncode == 0, taken.stderr
    assert not same or taken.stdout == forked("train.py", "--steps", "8", folder=folder).stdout
    assert "Sequential under p3" in taken.stderr
    assert "rejected" not in taken.stderr
    assert not running_in(folder)


def test_no_process_outlives_the_command(folder):
    command = foretrain("run", "--nproc", "2", "--servers", "1", "--", "endless.py", str(folder))
    environment = {**os.environ, **QUIET}
    with started(command, cwd=folder, env=environment, stderr=subprocess.DEVNULL) as process:
        until(lambda: all((folder / rank).exists() for rank in "01"))
        assert len(serving(folder)) == 1
        process.send_signal(signal.SIGTERM)
        process.wait(300)
    until(lambda: not running_in(folder))


@pytest.mark.smoke
def test_no_process_outlives_the_command_that_is_killed(folder):
    with running("--servers", 1, "--", "endless.py", folder, folder=folder) as command:
        pids = {command.pid, *descendants(command.pid)}
        assert len(pids) == 4
        os.kill(command.pid, signal.SIGKILL)
        assert command.finished().returncode == -signal.SIGKILL
    until(lambda: not pids & running_in(folder).keys())


def test_a_server_that_dies_is_started_again_and_not_for_ever(folder):
    options = ("--servers", 2, "--server-restarts", 1)
    with running(*options, "--", "endless.py", folder, folder=folder) as command:
        first = serving(folder)
        assert len(first) == 2
        os.kill(min(first), signal.SIGKILL)
        until(lambda: len(serving(folder) - {min(first)}) == 2)
        address = r"at 127\.0\.0\.1:\d+ was killed by SIGKILL"
        told = rf"foretrain: server \d {address}; it is started again \(1 of 1 times\)\n"
        until(lambda: re.search(told, command.err.read_text()))
        # The ranks go on: in the next round they need it.
        until(lambda: "all push again" in command.err.read_text())
        assert not command.ended()
        os.kill(max(serving(folder)), signal.SIGKILL)
        ended = command.finished()
    assert ended.returncode == 1
    assert re.search(rf"foretrain: server \d {address}, and --server-restarts 1 allows no more\n", ended.stderr)
    assert "PeerLost" not in ended.stderr
    until(lambda: not running_in(folder))


def test_servers_of_their_own(folder, monkeypatch):
    monkeypatch.setenv("FORETRAIN_SECRET", bytes(range(32)).hex())
    server = foretrain("server", "--address", "127.0.0.1:0", "--workers", "2")
    with started(server, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("server 0 of 1 for 2 workers listens on 127.0.0.1:")
            command = ("--servers", line.split()[-1], "--", "train.py", "--steps", "6")
            done = foretrain_run(*command, folder=folder)
            assert done.returncode == 0, done.stderr
            # Two models at once: the second finds the servers taken, and trains with PyTorch's own.
            two = TRAIN.replace("    other.register_comm_hook(None, hook)\n", "    first = DDP(network())\n")
            two = two.replace("train(DDP(network()), steps), train(other", "train(first, steps), train(other")
            (folder / "train.py").write_text(two)
            done = foretrain_run(*command, folder=folder)
            assert done.returncode == 0, done.stderr
            assert "the job's servers serve one model" in done.stderr
        finally:
            process.terminate()
        assert process.wait(300) == 143
