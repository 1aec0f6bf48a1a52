"""Progress of a command in a log, and its end when the reader of its output is gone."""

import subprocess
import sys

import pytest

from foretrain.cli.progress import Lines, counter, percent_bar, progress_bar, stages
from tests.processes import started

_BLOCK = """
import time
from foretrain.cli.progress import StdoutClosed, end_with_reader

try:
    with end_with_reader():
        print("on", flush=True)
        while True:
            try:
                time.sleep(0.01)
            except (Exception, ConnectionError):
                pass
except StdoutClosed:
    raise SystemExit(7)
"""


def test_block_ends_although_it_passes_over_errors_of_its_own_pipes() -> None:
    with started([sys.executable, "-c", _BLOCK], stdout=subprocess.PIPE, text=True) as block:
        assert block.stdout
        assert block.stdout.readline() == "on\n"
        block.stdout.close()
        assert block.wait(timeout=300) == 7


def test_block_that_is_read_goes_on() -> None:
    text = "from foretrain.cli.progress import end_with_reader\nwith end_with_reader():\n    print('all of it')\n"
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert ended.stdout == "all of it\n"


def test_a_log_gets_a_line_now_and_then(capsys: pytest.CaptureFixture[str]):
    often, seldom = Lines("scenarios", every=0), Lines("scenarios")
    for done in (0, 500, 1000):
        often(done, 1000)
        seldom(done, 1000)
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("foretrain: 500 of 1,000 scenarios, ")
    assert last == "foretrain: 1,000 of 1,000 scenarios, 0:00:00 left"


def test_where_stderr_is_no_terminal_there_is_no_bar(capsys: pytest.CaptureFixture[str]):
    with counter("sweeping", "scenarios") as count, progress_bar("planning") as plan, percent_bar("packets") as share:
        count(1, 2)
        plan("policies", 1, 2)
        share(1, 2)
    with stages() as measure:
        measure("operators", 0, 2)
        measure("operators", 2, 2)
    assert capsys.readouterr().err == ""


def test_each_stage_has_lines_of_its_own_in_a_log(capsys: pytest.CaptureFixture[str]):
    with stages(every=0) as measure:
        for things in ("products", "convolutions"):
            measure(things, 0, 3)
            measure(things, 2, 3)
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("foretrain: 2 of 3 products, ")
    assert last.startswith("foretrain: 2 of 3 convolutions, ")
