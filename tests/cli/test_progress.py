"""How far a command is, where nobody watches."""

import pytest

from foretrain.cli.progress import Lines, counter, progress_bar


def test_a_log_gets_a_line_now_and_then(capsys: pytest.CaptureFixture[str]):
    often, seldom = Lines("scenarios", every=0), Lines("scenarios")
    for done in (0, 500, 1000):
        often(done, 1000)
        seldom(done, 1000)
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("foretrain: 500 of 1,000 scenarios, ")
    assert last == "foretrain: 1,000 of 1,000 scenarios, 0:00:00 left"


def test_where_stderr_is_no_terminal_there_is_no_bar(capsys: pytest.CaptureFixture[str]):
    with counter("sweeping", "scenarios") as count, progress_bar("planning") as plan:
        count(1, 2)
        plan("policies", 1, 2)
    assert capsys.readouterr().err == ""
