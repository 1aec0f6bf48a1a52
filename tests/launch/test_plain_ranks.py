"""`foretrain run` where PyTorch is not installed: a session's ranks, their servers, and their ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from foretrain.comm.rendezvous import free_port
from foretrain.errors import ConfigError
from foretrain.launch import command
from foretrain.launch.child_processes import Nodes, nodes_of

SEVERAL = ("--nnodes=2", "--node-rank", "0", "--master-addr", "10.0.0.1", "--master-port", "29500")
EXAMPLE = Path(__file__).parents[2] / "examples" / "08_numpy.py"
_WITHOUT_TORCH = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, *where):
        return None if name.partition(".")[0] == "torch" else self.finder.find_spec(name, *where)

sys.meta_path[:] = map(Without, sys.meta_path)
from foretrain.cli import main
main(sys.argv[1:])
"""


def run(*arguments: object, **options) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", _WITHOUT_TORCH, "run", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=600, **options)


@pytest.mark.smoke_case("0")
@pytest.mark.parametrize("servers", [0, 1])
def test_ranks_of_numpy_end_with_the_same_weights(servers):
    options = ["--servers", servers, "--quiet"] * bool(servers)
    ended = run("--nproc", 2, "--schedule", "prophet", *options, "--", EXAMPLE)
    assert ended.returncode == 0, ended.stderr
    assert ("foretrain: " in ended.stderr) == ("--quiet" not in options), ended.stderr
    found = re.findall(r"rank (\d) of 2: prophet[^;]*; Σ\|w\| = ([\d.]+)", ended.stdout)
    assert sorted(rank for rank, _ in found) == ["0", "1"], ended.stdout
    assert len({weights for _, weights in found}) == 1


def test_a_rank_that_fails_ends_the_others(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys, time\nsys.exit(7) if os.environ['RANK'] == '1' else time.sleep(600)\n")
    ended = run("--nproc", 3, "--", script)
    assert ended.returncode == 7
    assert "rank 1 " in ended.stderr
    assert "ended with 7 first" in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ranks_end_with_their_launcher(tmp_path, number):
    script = tmp_path / "script.py"
    script.write_text("import os, time\nos.write(1, b'%d\\n' % os.getpid())\ntime.sleep(600)\n")
    line = [sys.executable, "-c", _WITHOUT_TORCH, "run", "--nproc", "2", "--", str(script)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, start_new_session=True) as launcher:
        assert launcher.stdout is not None
        try:
            pids = [int(launcher.stdout.readline()) for _ in range(2)]
        finally:
            launcher.send_signal(number)
        assert launcher.wait(300)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.smoke
def test_two_nodes_meet_at_the_address_of_the_first(tmp_path):
    key = tmp_path / "key"
    key.write_text("5a" * 32)
    key.chmod(0o600)
    where = ("--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", free_port(), "--secret-file", key)
    with ThreadPoolExecutor(2) as pool:
        nodes = [pool.submit(run, *where, "--node-rank", k, "--nproc", 1, "--", EXAMPLE) for k in range(2)]
    found = ""
    for node in nodes:
        assert node.result().returncode == 0, node.result().stderr
        found += node.result().stdout
    assert "rank 0 of 2" in found
    assert "rank 1 of 2" in found


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--rdzv-backend", "c10d"), "install torch, start the ranks with mpirun"),
        (("--nproc-per-node", "gpu"), "is no such number; write 1 or more"),
        (("--nnodes", "2", "--node-rank", "2"), "is none of 2 nodes; write 0 to 1"),
        (("--nnodes", "2"), "does not say where ranks meet; write --master-addr and --master-port"),
        (("--nnodes",), "write a value behind each"),
    ],
)
def test_what_needs_torchrun_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        nodes_of(options)


def test_ranks_of_nodes():
    assert nodes_of([]) == Nodes()
    assert nodes_of(["--nproc-per-node=3"]) == Nodes(3)
    assert nodes_of(["--nproc_per_node", "cpu"]).local == os.cpu_count()
    assert nodes_of([*SEVERAL, "--node_rank=1"]) == Nodes(1, 2, 1, "10.0.0.1", 29500)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--compression", "fp16"), "compression: 'fp16' is for DistributedDataParallel"),
        (("--timeout", "9s"), "timeouts:"),
        (("--servers", "1", "--updates", "servers"), "transport:"),
        (("--tune",), "tune: True is for DistributedDataParallel, which comes with PyTorch; install torch"),
        (("--advise",), "which comes with PyTorch; install torch, or leave it out\n"),
        (SEVERAL, "secret-file is missing: ranks of other nodes are let in by it"),
        ((*SEVERAL, "--servers", "1"), "loopback device of one of 2 nodes"),
    ],
)
def test_options_that_a_session_would_not_know_and_nodes_without_a_secret_are_refused(
    options, said, monkeypatch, refused
):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    monkeypatch.delenv("FORETRAIN_SECRET", raising=False)
    assert said in refused(["run", *options, "--", str(EXAMPLE)])


def test_a_server_that_dies_too_often_is_named(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, time\n"
        "for each in filter(str.isdigit, os.listdir('/proc')):\n"
        "    try:\n"
        "        line = open(f'/proc/{each}/cmdline').read().split(chr(0))\n"
        "        if 'server' in line and str(os.getppid()) in open(f'/proc/{each}/stat').read().split()[3]:\n"
        "            os.kill(int(each), signal.SIGKILL)\n"
        "    except OSError:\n"
        "        pass\n"
        "time.sleep(600)\n"
    )
    ended = run("--servers", 1, "--server-restarts", 0, "--", script)
    assert ended.returncode == 1, ended.stderr
    assert "server 0 at 127.0.0.1" in ended.stderr
