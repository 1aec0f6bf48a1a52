"""One process per host: what it sees, and that none outlives the launch."""

import importlib
import os
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from foretrain.errors import ConfigError
from foretrain.lab import Lab, LabError, LaunchError, labs, launch, network
from foretrain.lab.launch import environment_of
from tests.processes import started
from tests.waiting import until

# The package's attribute of this name is the function.
MODULE = importlib.import_module("foretrain.lab.launch")


@pytest.fixture
def lab(name: str) -> Lab:
    return Lab.up(name, 3)


class Lines:
    """What the ranks wrote, by rank."""

    def __init__(self) -> None:
        self.of: dict[int, list[str]] = defaultdict(list)

    def __call__(self, rank: int, line: str) -> None:
        self.of[rank].append(line)


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


def shell(code: str) -> list[str]:
    return ["sh", "-c", code]


def environments(lab: Lab, **options) -> list[dict[str, str]]:
    lines = Lines()
    assert launch(lab, ["env"], on_line=lines, **options) == 0
    return [dict(line.split("=", 1) for line in lines.of[rank] if "=" in line) for rank in range(len(lab.hosts))]


def test_every_rank_knows_the_job_and_its_place(lab):
    seen = environments(lab, environment={"MINE": "1", "OMP_NUM_THREADS": "2", "RANK": "77"})
    for rank, (environment, host) in enumerate(zip(seen, lab.hosts, strict=True)):
        expected = {
            "RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": lab.hosts[0].address, "GLOO_SOCKET_IFNAME": host.interface,
            "TP_SOCKET_IFNAME": host.interface, "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "MINE": "1",
            "OMP_NUM_THREADS": "2",
        }  # fmt: skip
        assert {key: environment[key] for key in expected} == expected
        assert environment["PATH"] == os.environ["PATH"]
    assert len({(environment["MASTER_PORT"], environment["FORETRAIN_SECRET"]) for environment in seen}) == 1
    assert 1024 < int(seen[0]["MASTER_PORT"]) < 65536
    assert len(bytes.fromhex(seen[0]["FORETRAIN_SECRET"])) == 32
    assert environments(lab)[0]["FORETRAIN_SECRET"] != seen[0]["FORETRAIN_SECRET"]
    assert environments(lab)[0]["OMP_NUM_THREADS"] == "1"


def test_hosts_take_turns_on_cores(lab):
    allowed, lines = sorted(os.sched_getaffinity(0)), Lines()
    code = python("import os; print(*os.sched_getaffinity(0))")
    assert launch(lab, code, cores=len(allowed), on_line=lines) == 0
    assert lines.of == {rank: [str(allowed[rank % len(allowed)])] for rank in range(3)}
    assert os.sched_getaffinity(0) == {*allowed}


@pytest.mark.smoke
def test_ranks_run_on_their_hosts_and_reach_the_master(lab):
    code = """
import os, socket, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    server = socket.create_server(place)
    for _ in range(size - 1):
        peer, (address, _) = server.accept()
        print(address, peer.recv(9).decode())
else:
    while True:
        try:
            socket.create_connection(place).sendall(str(rank).encode())
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
"""
    lines = Lines()
    launch(lab, python(code), timeout=300, on_line=lines)
    assert sorted(lines.of[0]) == [f"{lab.hosts[1].address} 1", f"{lab.hosts[2].address} 2"]


def test_lines_of_both_streams_are_complete_and_in_order(lab):
    code = """
import os, sys
os.write(1, b"half")
os.write(1, b" a line\\r\\n\\n\\xff\\n")
for number in range(5000):
    print(number, file=sys.stderr if number % 2 else sys.stdout, flush=True)
os.write(1, b"x" * 100_000 + b"\\nno newline")
"""
    lines = Lines()
    launch(lab, python(code), on_line=lines)
    for rank in range(3):
        assert lines.of[rank][:3] == ["half a line", "", "\N{REPLACEMENT CHARACTER}"]
        assert lines.of[rank][3:5003] == [str(number) for number in range(5000)]
        assert "".join(lines.of[rank][5003:]) == "x" * 100_000 + "no newline"


def test_one_failure_ends_all_and_is_named(lab):
    code = "if [ $RANK = 1 ]; then seq 30; echo oops >&2; exit 3; fi; exec sleep 600"
    with pytest.raises(LaunchError) as raised:
        launch(lab, shell(code), grace=0.1)
    error = raised.value
    assert (error.rank, error.status) == (1, 3)
    assert error.lines[-2:] == ("30", "oops")
    assert len(error.lines) == 20
    assert f"rank 1, on ft-{lab.name}-h1, ended with exit status 3" in str(error)
    assert str(error).endswith("\n  | oops")
    assert network.processes(lab.name) == ()


def test_other_ranks_may_report_and_end_within_the_grace(lab, tmp_path):
    """Within the grace they end by themselves, and the first failure is still the one that is named."""
    lines = Lines()
    note = tmp_path / "pid"
    # A rank's number is taken until the launcher has seen its end.
    first = f"if [ $RANK = 2 ]; then echo $$ >{note}.new; mv {note}.new {note}; exit 9; fi"
    others = f"until [ -e {note} ]; do sleep 0.01; done; while kill -0 $(cat {note}) 2>/dev/null; do sleep 0.01; done"
    with pytest.raises(LaunchError) as raised:
        launch(lab, shell(f"{first}; {others}; echo rank 2 is lost; exit 1"), on_line=lines, grace=60)
    assert (raised.value.rank, raised.value.status) == (2, 9)
    assert lines.of[0] == lines.of[1] == ["rank 2 is lost"]


def test_a_killed_rank_is_named_with_its_signal(lab):
    with pytest.raises(LaunchError, match=r"rank 0.*was killed by SIGSEGV; rank 0 wrote nothing") as raised:
        launch(lab, shell("if [ $RANK = 0 ]; then kill -SEGV $$; fi; exec sleep 600"), grace=0.1)
    assert raised.value.status == -signal.SIGSEGV


def test_ranks_are_ended_when_time_runs_out(lab, monkeypatch):
    """Also for a rank that is stopped and one that ignores SIGTERM."""
    monkeypatch.setattr(MODULE, "END_TIMEOUT", 0.2)
    code = "case $RANK in 0) sleep 600;; 1) kill -STOP $$;; 2) trap '' TERM; sleep 600; sleep 600;; esac"
    with pytest.raises(LaunchError, match=r"ranks 0, 1, 2 of 3 not done after 0.5 s") as raised:
        launch(lab, shell(code), timeout=0.5)
    assert (raised.value.rank, raised.value.status) == (0, None)
    assert network.processes(lab.name) == ()


@pytest.mark.parametrize("start", ["sleep 600 &", "setsid sleep 600 &", "setsid sh -c 'trap \"\" TERM; sleep 600' &"])
def test_background_processes_of_ranks_are_ended(lab, start, monkeypatch):
    """A background process that holds the output open neither blocks the launch nor survives it."""
    monkeypatch.setattr(MODULE, "END_TIMEOUT", 0.2)
    assert launch(lab, shell(f"{start} sleep 0.1")) == 0
    assert network.processes(lab.name) == ()


def test_processes_without_the_launch_s_environment_are_let_alone(lab):
    """They are not known as a rank's children, and may hold the output open: left to `down --kill`."""
    lines = Lines()
    with started(lab.command(1, ["sleep", "600"])) as other:
        assert launch(lab, shell("env -i setsid sleep 600 & sleep 0.1; printf half"), on_line=lines) == 0
        assert lines.of == {0: ["half"], 1: ["half"], 2: ["half"]}
        assert other.poll() is None
        assert lab.down(kill=True) == ()


def test_an_error_of_the_listener_ends_all(lab):
    def listener(rank: int, line: str) -> None:
        raise ZeroDivisionError(line)

    with pytest.raises(ZeroDivisionError, match="hello"):
        launch(lab, shell("echo hello; exec sleep 600"), on_line=listener)
    assert network.processes(lab.name) == ()


def test_a_launch_closes_its_descriptors(lab):
    launch(lab, ["true"])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        launch(lab, ["true"])
        with pytest.raises(LaunchError):
            launch(lab, ["false"])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_missing_program_or_lab_is_refused(lab):
    with pytest.raises(ConfigError, match="'nosuch --x' is not a program"):
        launch(lab, ["nosuch", "--x"])
    with pytest.raises(ConfigError, match="command"):
        launch(lab, [])
    lab.down()
    with pytest.raises(LabError, match="there is no lab"):
        launch(lab, ["true"])


SCRIPT = """
import sys
from foretrain.lab import Lab, launch

with Lab.up(sys.argv[1], 2) as lab:
    launch(lab, ["sh", "-c", "setsid sleep 600 & echo $! $$; wait"], on_line=lambda rank, line: print(line, flush=True))
"""


def launched(name: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A launcher in a process of its own, with the pids of ranks first and of their children last."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pairs = [[int(pid) for pid in process.stdout.readline().split()] for _ in range(2)]
    return process, [pair[1] for pair in pairs] + [pair[0] for pair in pairs]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_process_inside_execve_is_recognised():
    again = 'exec sh -c "$0" "$0"'
    with subprocess.Popen(["/bin/sh", "-c", again, again], env={"MARK": "1"}) as process:
        try:
            assert all(b"MARK=1" in environment_of(process.pid) for _ in range(3000))
        finally:
            process.kill()


def test_ctrl_c_leaves_no_process_and_no_namespace(name):
    process, pids = launched(name)
    assert all(map(lives, pids))
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=300)
    assert error.rstrip().endswith("KeyboardInterrupt")
    assert not any(map(lives, pids))
    assert name not in labs()


def test_ranks_die_with_a_killed_launcher(name):
    process, pids = launched(name)
    process.kill()
    process.communicate(timeout=300)
    until(lambda: not any(map(lives, pids[:2])))
    # What ranks had started is shown by its host and can be ended; and a lab that stood is no obstacle.
    assert {p.pid for host in Lab.find(name).status().hosts for p in host.processes} == set(pids[2:])
    assert Lab.up(name, 2).down(kill=True) == ()
    assert not any(map(lives, pids))
