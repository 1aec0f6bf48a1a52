"""What goes wrong in a live simulation: it is said, with the script's own words, and nothing is left behind."""

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from foretrain.cli import main
from tests.live.command import command, simulate

CLUSTER = "dgx-h100:1,ranks=0-1"


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        (
            "raise on one",
            1,
            ["failed on rank 1:", 'raise ValueError("only here")', "rank 0 waits in all_reduce #3"],
        ),
        (
            "raise",
            1,
            [
                "ValueError: everywhere",
                "warning: ",
                "Long value on the host",
                "failed on rank 0 with exit status 1",
                "1 of 2 ranks were live",
            ],
        ),
        ("exit early", 2, ["rank 0 waits in all_reduce #3", "for rank 1, which has ended", "rank 0 stood at"]),
        ("exits", 3, ["rank 1 left with exit status 3 at", "fault.py:", "sys.exit(3)"]),
        ("fewer steps", 2, ["all ranks have ended", "rank 0 waits in all_reduce #3", "for rank 1, which has ended"]),
        ("killed", 137, ["rank 1 was killed by SIGKILL", "rank 0 waits in all_reduce #3"]),
        ("leaves at once", 1, ["rank 1 ended with exit status 0 (os._exit?)", "rank 0 waits in all_reduce #3"]),
        (
            "polls",
            2,
            ["rank 0 has asked its GPU for a day", "rank 0 waits in all_reduce #3", "for rank 1, which has ended"],
        ),
        ("mismatch", 2, ["rank 0 calls broadcast", "rank 1 calls all_reduce", "stood at"]),
        ("memory", 1, ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 200.00 GiB"]),
        (
            "needs data",
            1,
            ["torch.repeat_interleave(torch.rand", "aten::repeat_interleave needs the values"],
        ),
        ("waits for a note", 1, ["fault.py", 'wait(["note of rank 1"]', "Wait timeout", "with --live all"]),
        ("waits for a value", 1, ["fault.py:", "has read a Float value on the host 20,000 times"]),
    ],
)
@pytest.mark.smoke_case("raise on one-1-words0")
def test_fault_is_told_in_the_scripts_own_words(fault: str, status: int, words: list[str]) -> None:
    # What all ranks do alike needs one of them.
    live = "auto" if fault in ("raise", "memory", "needs data", "waits for a note", "waits for a value") else "all"
    ended = simulate(CLUSTER, "fault.py", fault, options=("--live", live), status=status)
    assert [text for text in words if text not in ended.err] == []
    assert ended.err.count("Traceback") <= 1
    assert "src/foretrain" not in ended.err
    assert ended.numbers == {}


def test_script_that_may_wait_for_its_loss_is_told_that_it_is_none() -> None:
    words = "has read a value that is not real in 1,000 steps"
    endless = simulate(CLUSTER, "fault.py", "reads a loss", options=("--live", "all"))
    assert endless.err.count(words) == 1
    assert words not in simulate(CLUSTER, "fault.py", "reads a loss", options=("--steps", 1004)).err


def test_script_that_is_started_again_is_told_so(tmp_path: Path) -> None:
    again = "starting again with 2 live ranks: messages between them were seen"
    assert simulate(CLUSTER, "twice.py", tmp_path / "any", "again").err.count(again) == 1
    twice = simulate(CLUSTER, "twice.py", tmp_path / "auto", status=1).err
    words = (again, "FileExistsError", "the script had been started once before")
    assert [text for text in words if text not in twice] == []
    assert "again" not in simulate(CLUSTER, "twice.py", tmp_path / "all", options=("--live", "all")).err


@pytest.mark.parametrize(
    ("cluster", "options", "words"),
    [
        ("dgx-h100:1", ("--nproc", 4), "nproc: 4 is not the cluster's 8 GPUs"),
        ("dgx-h100:1", ("--live", 9), "live: 9 is not a number of ranks among 8"),
        ("dgx-h100:1", ("--live", "some"), "live: 'some' is neither auto, all nor a number"),
        ("dgx-h100:1", ("--steps", 0), "steps: 0 is not a positive number of steps"),
        ("star:4@100Gbps", (), "does not say which GPUs it has"),
        ("dgx-h100:2,ranks=0-3+8-15", (), "torchrun fills servers alike"),
    ],
)
def test_wrong_options_are_refused(
    cluster: str, options: tuple[object, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command(cluster, "stepless.py", options=options)[3:])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_missing_script_compiler_and_release_are_named(tmp_path: Path) -> None:
    absent = simulate("H100", "absent.py", status=2).err
    assert "'absent.py' is no file" in absent
    assert "Simulated GPUs" not in absent  # nothing was simulated
    bare = {"XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path)}
    told = simulate("H100", "stepless.py", environment=bare, status=2).err
    assert "needs a C++ compiler, but neither g++" in told
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.12.1'")
    wrong = simulate("H100", "stepless.py", environment={"PYTHONPATH": str(tmp_path)}, status=2).err
    assert "was tested with torch 2.13 to 2.15; torch 2.12.1 is installed, and lacks torch._C" in wrong


def _started(process: Path) -> int:
    """When a process was started, in clock ticks: pids begin anew when the largest is reached."""
    return int((process / "stat").read_text().rpartition(")")[2].split()[19])


class Running:
    """A command under way, whose processes are known by a mark in their environment."""

    def __init__(self, scratch: Path, *script: str, **environment: str) -> None:
        self.scratch = scratch
        self._mark = f"FORETRAIN_TEST={uuid.uuid4()}".encode()
        name, _, value = self._mark.decode().partition("=")
        self.process = subprocess.Popen(
            command(CLUSTER, *script, options=("--live", "all")),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {name: value, "TMPDIR": str(scratch)} | environment,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def pids(self) -> list[int]:
        """All that live, oldest first."""
        found = []
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and self._mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append((_started(folder), int(folder.name)))
            except OSError:
                continue
        return [pid for _, pid in sorted(found)]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < until, "it does not come about"
            time.sleep(0.02)

    def read(self, line: str, times: int) -> None:
        """Wait until the ranks have printed ``line`` so many times."""
        assert self.process.stdout
        assert [self.process.stdout.readline() for _ in range(times)] == [line] * times

    def check_nothing_is_left(self) -> str:
        _, told = self.process.communicate(timeout=300)
        self.wait_for(lambda: not self.pids())
        assert list(self.scratch.glob("foretrain-*")) == []
        return told


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts commands, which end with the test whatever happens."""
    started: list[Running] = []

    def start(*script: str, **environment: str) -> Running:
        started.append(Running(tmp_path, *script, **environment))
        return started[-1]

    yield start
    for one in started:
        for pid in one.pids():
            os.kill(pid, signal.SIGKILL)
        one.process.communicate()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("moment", "victim", "number", "words"),
    [
        ("computes", "command", signal.SIGINT, "interrupted"),
        ("computes", "command", signal.SIGKILL, ""),
        (
            "computes",
            "fork_server",
            signal.SIGKILL,
            "that starts the simulated ranks was killed by SIGKILL",
        ),
        ("computes", "rank", signal.SIGKILL, "was killed by SIGKILL"),
        ("starts", "command", signal.SIGTERM, ""),
        ("compiles", "command", signal.SIGKILL, ""),
    ],
)
def test_nothing_outlives_a_process_that_is_killed(
    running: Callable[..., Running], tmp_path: Path, moment: str, victim: str, number: int, words: str
) -> None:
    if moment == "compiles":
        one = running("stepless.py", XDG_CACHE_HOME=str(tmp_path / "cache"))
        one.wait_for(lambda: len(one.pids()) > 3)
    else:
        one = running("fault.py", "computes")
        one.wait_for(lambda: len(one.pids()) > 1)
    if moment == "computes":
        one.read("computes\n", 2)
        assert len(one.pids()) == 4
    place = {"command": 0, "fork_server": 1, "rank": 3}[victim]
    os.kill(one.pids()[place], number)
    assert words in one.check_nothing_is_left()
    assert one.process.returncode
    expected = {"command": 128 + number if number == signal.SIGINT else -number, "fork_server": 2, "rank": 128 + number}
    assert moment != "computes" or one.process.returncode == expected[victim]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("fault", "line", "times"), [("prints", "and again\n", 1), ("computes", "computes\n", 2)])
def test_a_command_whose_reader_is_gone_ends_quietly(
    running: Callable[..., Running], fault: str, line: str, times: int
) -> None:
    one = running("fault.py", fault)
    one.read(line, times)
    assert one.process.stdout
    one.process.stdout.close()
    one.process.stdout = None
    assert "Traceback" not in one.check_nothing_is_left()


def test_ranks_that_fail_alike_say_it_once() -> None:
    ended = simulate(CLUSTER, "fault.py", "memory", options=("--live", "all"), status=1)
    assert ended.err.count("Tried to allocate 200.00 GiB") == 1
    assert ended.err.count("as well") == 1
