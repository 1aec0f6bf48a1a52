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
]
NOTHING = ["help compare ", "help lab up ", "simulate --cluster H100 -- --"]


@pytest.fixture(params=["bash", "fish"])
def completed(request, tmp_path, capsys):
    """Ask a shell what may stand at the end of a line."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine: apt install {shell}")
    main(["completion", shell])
    file = tmp_path / "completion"
    file.write_text(capsys.readouterr().out)

    def ask(line: str) -> set[str]:
        words = line.split(" ")
        if shell == "bash":
            quoted = " ".join(f"'{word}'" for word in words)
            text = f"COMP_WORDS=(foretrain {quoted}); COMP_CWORD={len(words)}; _foretrain; "
            text += 'printf "%s\\n" "${COMPREPLY[@]}"'
        else:
            text = f"complete -C 'foretrain {line}'"
        command = [shell, "-c", f"source {file}; {text}"]
        told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=empty_folder(tmp_path))
        assert told.stderr == ""
        return set(told.stdout.split())

    return ask


def empty_folder(parent: Path) -> Path:
    """Return a folder that has no files to complete."""
    (parent / "empty").mkdir(exist_ok=True)
    return parent / "empty"


def test_a_shell_completes_commands_of_groups_options_and_their_choices(completed):
    for line, wanted in CASES:
        assert completed(line) >= wanted, line
    assert not completed("lab ") & {"--hosts", "compare-all"}
    for line in NOTHING:
        assert completed(line) == set(), line


def test_zsh_completes_the_commands_of_a_group(tmp_path, capsys):
    if shutil.which("zsh") is None:
        pytest.skip("no zsh on this machine: apt install zsh")
    main(["completion", "zsh"])
    file = tmp_path / "completion"
    file.write_text(f"PS1=\n{capsys.readouterr().out}")
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
