"""Completion, asked of the shells themselves."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
from pathlib import Path

import pytest

from foretrain.cli import main

CASES = [
    ("", {"compare", "lab", "help"}),
    ("comp", {"compare", "completion"}),
    ("help ", {"compare", "topology"}),
    ("help topology ", {"show", "list"}),
    ("topology ", {"show", "list"}),
    ("lab up --con", {"--congestion"}),
    ("lab up --congestion ", {"cubic", "bbr", "reno"}),
    ("compare alexnet --network ", {"ideal", "fluid", "packet", "auto"}),
    ("completion ", {"bash", "zsh", "fish"}),
    ("compare --sched", {"--schedules"}),
    ("lab status --q", {"--quiet"}),
    ("schedule alexnet --sch", {"--schedule"}),
    ("compare alexnet --no", {"--no-tune"}),
    ("compare res", {"resnet50", "resnet152"}),
    ("lab compare tra", {"transformer", "transformer_big"}),
    ("compare alexnet --schedules pro", {"prophet"}),
    ("simulate --device A1", {"A100"}),
]
OF_A_VALUE = [
    "compare resnet50 --cluster ",
    "compare resnet50 --html ",
    "compare --batch ",
    "plan vgg16 --out ",
    "lab up --hosts ",
    "run --servers ",
]
"""Lines at whose end a value stands that has no known names, but may be a file."""
NOTHING = ["help compare ", "help lab up ", "simulate --cluster H100 -- --"]


@pytest.fixture(params=["bash", "fish"])
def completed(request, tmp_path, capsys):
    """Ask a shell what may stand at the end of a line, in a folder without files."""
    file = script_of(request.param, tmp_path, capsys)
    return lambda line: completions(request.param, file, line)


def script_of(shell: str, folder: Path, capsys) -> Path:
    """Return the file of completion for a shell; skip a test where that is not installed."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine: apt install {shell}")
    main(["completion", shell])
    file = folder / "completion"
    file.write_text(capsys.readouterr().out)
    return file


def completions(shell: str, file: Path, line: str) -> set[str]:
    """Return what a shell completes, of bash without the files that readline adds where there is nothing else."""
    words = line.split(" ")
    if shell == "bash":
        quoted = " ".join(f"'{word}'" for word in words)
        text = f"COMP_WORDS=(foretrain {quoted}); COMP_CWORD={len(words)}; _foretrain; "
        text += 'printf "%s\\n" "${COMPREPLY[@]}"'
    else:
        text = f"complete -C 'foretrain {line}'"
    command = [shell, "-c", f"source {file}; {text}"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=empty_folder(file.parent))
    assert told.stderr == ""
    return set(told.stdout.split())


def empty_folder(parent: Path) -> Path:
    """Return a folder that has no files to complete, if a test makes none."""
    (parent / "empty").mkdir(exist_ok=True)
    return parent / "empty"


def test_a_shell_completes_commands_of_groups_options_and_their_choices(completed):
    for line, wanted in CASES:
        assert completed(line) >= wanted, line
    assert not completed("lab ") & {"--hosts", "compare-all"}
    assert "resnet50" not in completed("compare alexnet ")
    for line in NOTHING:
        assert completed(line) == set(), line


def test_where_a_value_is_due_no_options_are_offered(completed):
    for line in OF_A_VALUE:
        assert completed(line) == set(), line


def test_fish_completes_files_only_where_one_may_stand(tmp_path, capsys):
    file = script_of("fish", tmp_path, capsys)
    (empty_folder(tmp_path) / "abcd.toml").touch()
    for line in ("compare abc", "compare alexnet --cluster abc", "simulate --device abc", "sweep abc"):
        assert completions("fish", file, line) == {"abcd.toml"}, line
    for line in ("lab up --congestion abc", "lab abc", "help compare abc"):
        assert completions("fish", file, line) == set(), line


def test_zsh_completes_the_commands_of_a_group(tmp_path, capsys):
    file = script_of("zsh", tmp_path, capsys)
    file.write_text(f"PS1=\n{file.read_text()}")
    leader, follower = pty.openpty()
    environment = {"PATH": os.environ["PATH"], "TERM": "dumb", "HOME": str(tmp_path)}
    with subprocess.Popen(
        ["zsh", "-f", "-i"], stdin=follower, stdout=follower, stderr=follower, env=environment, start_new_session=True
    ) as process:
        os.close(follower)
        os.write(leader, f"source {file}; echo rea''dy\n".encode())
        _until(leader, b"ready\r")
        os.write(leader, b"foretrain lab exe\t")
        _until(leader, b"foretrain lab exec")
        process.kill()
    os.close(leader)


def _until(leader: int, wanted: bytes) -> None:
    """Read what a terminal shows until ``wanted`` is there."""
    shown = b""
    while wanted not in shown:
        assert select.select([leader], [], [], 300)[0], shown
        shown += os.read(leader, 1 << 16)
