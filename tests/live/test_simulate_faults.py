"""What goes wrong in a live simulation: it is said, with the script's own words, and nothing is left behind."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from foretrain.cli import main
from tests import warm
from tests.live import forked
from tests.live.command import command, simulate
from tests.processes import descendants
from tests.waiting import until

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
        ("exit early", 1, ["rank 0 waits in all_reduce #3", "for rank 1, which has ended", "rank 0 stood at"]),
        ("exits", 3, ["rank 1 left with exit status 3 at", "fault.py:", "sys.exit(3)"]),
        ("fewer steps", 1, ["all ranks have ended", "rank 0 waits in all_reduce #3", "for rank 1, which has ended"]),
        ("killed", 137, ["rank 1 was killed by SIGKILL", "rank 0 waits in all_reduce #3", "memory ran out"]),
        ("leaves at once", 1, ["rank 1 ended with exit status 0 (os._exit?)", "rank 0 waits in all_reduce #3"]),
        (
            "polls",
            1,
            ["rank 0 has asked its GPU for a day", "rank 0 waits in all_reduce #3", "for rank 1, which has ended"],
        ),
        ("mismatch", 1, ["rank 0 calls broadcast", "rank 1 calls all_reduce", "stood at"]),
        ("memory", 1, ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 200.00 GiB", "as well"]),
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
    live = "auto" if fault in ("raise", "needs data", "waits for a note", "waits for a value") else "all"
    ended = simulate(CLUSTER, "fault.py", fault, options=("--live", live), status=status)
    assert [text for text in words if text not in ended.err] == []
    assert ended.err.count("Traceback") <= 1  # also of ranks that fail alike
    assert "src/foretrain" not in ended.err
    assert ended.numbers == {}


def test_a_module_that_is_not_there_is_no_matter_of_live_ranks() -> None:
    def script():
        import nothing_such  # noqa: F401

    said = simulate(CLUSTER, script, status=1).err
    assert said.splitlines()[-1] == "foretrain: the script failed on rank 0 with exit status 1"
    assert "ModuleNotFoundError: No module named 'nothing_such'" in said


def test_script_that_may_wait_for_its_loss_is_told_that_it_is_none() -> None:
    words = "has read a value that is not real in 1,000 steps"
    endless = simulate(CLUSTER, "fault.py", "reads a loss", options=("--live", "all"))
    assert endless.err.count(words) == 1
    assert words not in simulate(CLUSTER, "fault.py", "reads a loss", options=("--steps", 1004)).err


def test_a_number_of_live_ranks_with_which_messages_do_not_fit_is_told() -> None:
    def chain() -> None:
        import torch
        from torch import distributed as dist

        rank, x = dist.get_rank(), torch.ones(8, device="cuda")
        dist.recv(x, rank - 1) if rank % 2 else dist.send(x, rank + 1)

    stalled = simulate("dgx-h100:1", chain, options=("--live", 3), status=1).err
    assert "3 of 8 ranks were live and stood for the others, which may be why: run all with --live all" in stalled


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


def test_missing_script_compiler_and_release_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = simulate("H100", "absent.py", status=2).err
    assert "'absent.py' is no file" in absent
    assert "Simulated GPUs" not in absent  # nothing was simulated
    with monkeypatch.context() as bare:
        bare.setenv("XDG_CACHE_HOME", str(tmp_path))
        bare.setenv("PATH", str(tmp_path))
        assert "needs a C++ compiler, but neither g++" in simulate("H100", "stepless.py", status=1).err
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.12.1'")
    wrong = simulate("H100", "stepless.py", environment={"PYTHONPATH": str(tmp_path)}, status=1).err
    assert "was tested with torch 2.13 to 2.15; torch 2.12.1 is installed, and lacks torch._C" in wrong


class Running:
    """A simulation by two live ranks under way, and all processes of it that were ever seen."""

    def __init__(self, command: warm.Started, scratch: Path) -> None:
        self.command, self._scratch, self._mark = command, scratch, f"TMPDIR={scratch}".encode()
        self._seen: dict[int, int] = {}

    def pids(self) -> list[int]:
        """All that live, oldest first; those that were forked are known by their parents, others by their TMPDIR."""
        found = {self.command.pid, *descendants(self.command.pid)}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self._mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.add(int(folder.name))
        for pid in found:
            self._seen.setdefault(pid, _began(pid))
        alive = [(began, pid) for pid, began in self._seen.items() if began and _began(pid) == began]
        return [pid for _, pid in sorted(alive)]

    def printed(self, line: str, times: int) -> None:
        """Wait until the ranks have printed ``line`` so many times."""
        until(lambda: self.command.out.read_text() == line * times)

    def check_nothing_is_left(self) -> CompletedProcess[str]:
        ended = self.command.finished()
        until(lambda: not self.pids())
        assert list(self._scratch.glob("foretrain-*")) == []
        return ended


def _began(pid: int) -> int:
    """When a process was started, in clock ticks: pids begin anew when the largest is reached; 0 if it has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 0


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Running]]:
    """Starts a simulation, which ends with the test whatever happens."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with ExitStack() as stack:

        def start(fault: str, read: int = 0) -> Running:
            words = command(CLUSTER, "fault.py", fault, options=("--live", "all"))[4:]
            run, told = (forked.simulate_for_a_reader, [str(read), *words]) if read else (forked.simulate, words)
            return Running(stack.enter_context(warm.started(run, told)), tmp_path)

        yield start


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("victim", "number", "status", "words"),
    [
        ("command", signal.SIGINT, 130, "interrupted"),
        ("command", signal.SIGKILL, -9, ""),
        ("fork_server", signal.SIGKILL, 1, "that starts the simulated ranks was killed by SIGKILL"),
        ("rank", signal.SIGKILL, 137, "was killed by SIGKILL"),
    ],
)
def test_nothing_outlives_a_process_that_is_killed(
    start: Callable[..., Running], victim: str, number: int, status: int, words: str
) -> None:
    one = start("computes")
    one.printed("computes\n", 2)
    place = {"command": 0, "fork_server": 1, "rank": 3}[victim]
    assert len(one.pids()) == 4
    os.kill(one.pids()[place], number)
    ended = one.check_nothing_is_left()
    assert words in ended.stderr
    assert ended.returncode == status


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("cold", "number", "least"), [(False, signal.SIGTERM, 2), (True, signal.SIGKILL, 7)])
def test_nothing_outlives_a_command_that_is_killed_before_ranks_run_or_while_it_compiles(
    start: Callable[..., Running],
    cold: bool,
    number: int,
    least: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if cold:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    one = start("computes")
    # Compiling: the command, a process that compiles for it and what ends that, and the same twice for the compilers.
    until(lambda: len(one.pids()) >= least)
    os.kill(one.command.pid, number)
    assert one.check_nothing_is_left().returncode in (-number, 128 + number)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("fault", "lines"), [("prints", 1), ("computes", 2)])
def test_a_command_whose_reader_is_gone_ends_quietly(start: Callable[..., Running], fault: str, lines: int) -> None:
    assert "Traceback" not in start(fault, read=lines).check_nothing_is_left().stderr
