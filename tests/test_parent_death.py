"""Commands end with the process that waits for them."""

import os
import signal
import subprocess
import sys

import pytest

from foretrain.parent_death import ending_with_this, run_to_end


def test_a_command_that_fails_says_what_it_wrote():
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run_to_end(["sh", "-c", "echo no such header >&2; exit 3"])
    assert (caught.value.returncode, caught.value.stderr) == (3, "no such header\n")
    with pytest.raises(subprocess.CalledProcessError, match="no-such-compiler"):
        run_to_end(["no-such-compiler"])


def test_a_command_that_takes_too_long_ends_with_all_that_it_started(tmp_path):
    fifo = tmp_path / "ended"
    os.mkfifo(fifo)
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reading, True)
    with pytest.raises(subprocess.TimeoutExpired):
        run_to_end(["sh", "-c", f"exec > {fifo}; echo runs; sleep 1000 & wait"], timeout=1)
    with open(reading, "rb") as pipe:
        assert pipe.read() in (b"runs\n", b"")  # to the end of the last process


@pytest.mark.process
def test_a_command_ends_with_a_parent_that_is_killed(tmp_path):
    fifo = tmp_path / "ended"
    os.mkfifo(fifo)
    code = "import sys; from foretrain.parent_death import run_to_end; run_to_end(sys.argv[1:])"
    waits = ["sh", "-c", f"exec > {fifo}; echo runs; sleep 1000 & wait"]
    with subprocess.Popen([sys.executable, "-c", code, *waits]) as parent, open(fifo, "rb") as pipe:
        assert pipe.readline() == b"runs\n"
        parent.send_signal(signal.SIGKILL)
        assert pipe.read() == b""  # to the end of the last process


def test_a_command_is_not_run_where_its_parent_has_ended_before(tmp_path):
    command = ending_with_this(["touch", tmp_path / "ran"])
    elsewhere = ["sh", "-c", '"$@"; exit $?', "sh", *command]  # a child of another process than the one that is named
    assert subprocess.run(elsewhere, capture_output=True, check=False).returncode
    assert not (tmp_path / "ran").exists()
    subprocess.run(command, check=True)
    assert (tmp_path / "ran").exists()
