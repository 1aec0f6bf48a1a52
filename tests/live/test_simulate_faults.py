"""What goes wrong in a live simulation: it is said, with the script's own words, and nothing is left behind."""

import os
import random
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


@pytest.mark.usefixtures("device")
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
            ["ValueError: everywhere", "warning: ", "Long value on the host", "failed on rank 0 with exit status 1"],
        ),
        ("exit early", 2, ["rank 0 waits in all_reduce #3", "for rank 1, which has ended", "rank 0 stood at"]),
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
    ended = simulate(CLUSTER, "fault.py", fault, options=("--live", live))
    assert ended.status == status, ended.err
    for text in words:
        assert text in ended.err
    assert ended.err.count("Traceback") <= 1
    assert "src/foretrain" not in ended.err
    assert ended.numbers == {}


@pytest.mark.usefixtures("device")
def test_script_that_may_wait_for_its_loss_is_told_that_it_is_none() -> None:
    words = "has read a value that is not real in 1,000 steps"
    endless = simulate(CLUSTER, "fault.py", "reads a loss", options=("--live", "all"))
    assert endless.status == 0, endless.err
    assert endless.err.count(words) == 1
    assert words not in simulate(CLUSTER, "fault.py", "reads a loss", options=("--steps", 1004)).err


@pytest.mark.usefixtures("device")
def test_script_that_is_started_again_is_told_so(tmp_path: Path) -> None:
    again = "starting again with 2 live ranks: messages between them were seen"
    able = simulate(CLUSTER, "twice.py", tmp_path / "any", "again")
    assert able.status == 0, able.err
    assert able.err.count(again) == 1
    twice, once = (simulate(CLUSTER, "twice.py", tmp_path / live, options=("--live", live)) for live in ("auto", "all"))
    assert twice.status == 1
    assert again in twice.err
    assert "FileExistsError" in twice.err
    assert "the script had been started once before" in twice.err
    assert once.status == 0, once.err
    assert "again" not in once.err


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
    absent = simulate("H100", "absent.py").err
    assert "'absent.py' is no file" in absent
    assert "Simulated GPUs" not in absent  # nothing was simulated
    bare = {"XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path)}
    assert "needs a C++ compiler, but neither g++" in simulate("H100", "stepless.py", environment=bare).err
    other = {"XDG_CACHE_HOME": str(tmp_path), "CXX": "no-such-compiler"}
    assert "CXX: 'no-such-compiler' is no compiler" in simulate("H100", "stepless.py", environment=other).err
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.12.1'")
    wrong = simulate("H100", "stepless.py", environment={"PYTHONPATH": str(tmp_path)})
    assert wrong.status == 2
    assert "needs torch 2.13.*, and 2.12.1 is installed" in wrong.err


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
        until = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < until, "it does not come about"
            time.sleep(0.02)

    def check_nothing_is_left(self) -> str:
        _, told = self.process.communicate(timeout=60)
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
    ("victim", "number", "status", "words"),
    [
        ("command", signal.SIGINT, 130, "interrupted"),
        ("command", signal.SIGKILL, -9, ""),
        ("fork_server", signal.SIGKILL, 2, "the process that starts the simulated ranks was killed by SIGKILL"),
        ("rank", signal.SIGKILL, 137, "was killed by SIGKILL"),
    ],
)
def test_nothing_outlives_a_process_that_is_killed(
    running: Callable[..., Running], victim: str, number: int, status: int, words: str
) -> None:
    one = running("fault.py", "computes")
    assert one.process.stdout
    for _ in range(2):
        assert one.process.stdout.readline() == "computes\n"
    command_, fork_server, *ranks = one.pids()
    assert len(ranks) == 2
    os.kill({"command": command_, "fork_server": fork_server, "rank": ranks[1]}[victim], number)
    assert words in one.check_nothing_is_left()
    assert one.process.returncode == status


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("seed", range(3))
def test_nothing_outlives_a_command_that_is_ended_at_any_moment(running: Callable[..., Running], seed: int) -> None:
    chance = random.Random(seed)
    one = running("fault.py", "computes")
    time.sleep(chance.uniform(0.1, 4))
    one.process.send_signal(chance.choice([signal.SIGINT, signal.SIGTERM]))
    one.check_nothing_is_left()
    assert one.process.returncode


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_a_command_that_is_ended_while_it_compiles(
    running: Callable[..., Running], tmp_path: Path, number: int
) -> None:
    one = running("stepless.py", XDG_CACHE_HOME=str(tmp_path / "cache"))
    one.wait_for(lambda: len(one.pids()) > 3)
    one.process.send_signal(number)
    one.check_nothing_is_left()
    assert one.process.returncode


@pytest.mark.usefixtures("device")
def test_reader_that_has_seen_enough_ends_the_command_quietly(running: Callable[..., Running]) -> None:
    one = running("fault.py", "prints")
    assert one.process.stdout
    assert one.process.stdout.readline() == "and again\n"
    one.process.stdout.close()
    one.process.stdout = None
    told = one.check_nothing_is_left()
    assert "Traceback" not in told


@pytest.mark.usefixtures("device")
def test_nothing_goes_on_for_a_reader_who_is_gone(running: Callable[..., Running]) -> None:
    one = running("fault.py", "computes")
    assert one.process.stdout
    for _ in range(2):
        assert one.process.stdout.readline() == "computes\n"
    one.process.stdout.close()
    one.process.stdout = None
    assert "Traceback" not in one.check_nothing_is_left()


@pytest.mark.usefixtures("device")
def test_ranks_that_fail_alike_say_it_once() -> None:
    ended = simulate(CLUSTER, "fault.py", "memory", options=("--live", "all"))
    assert ended.status == 1
    assert ended.err.count("Tried to allocate 200.00 GiB") == 1
    assert ended.err.count("as well") == 1
