"""The table says what the comparison holds, at any width."""

import io

import pytest
from rich.console import Console

from foretrain.experiments import Comparison, compare
from foretrain.report import summary
from foretrain.report.table import labels, ranking, rows
from foretrain.units import format_time
from foretrain.workload import zoo


def shown(comparison: Comparison, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(summary(comparison))
    return out.getvalue()


def test_rows_are_sorted_and_complete(comparison: Comparison):
    lines, runs = rows(comparison), ranking(comparison)
    asked = [run.schedule for run in comparison.runs]
    assert len(lines) == len(asked) + (comparison.baseline.schedule not in asked)
    assert [run.iteration_time for run in runs] == sorted(run.iteration_time for run in runs)
    assert "best" in lines[0].marks
    assert [line.iteration for line in lines] == [format_time(run.iteration_time) for run in runs]
    assert sum("baseline" in line.marks for line in lines) == 1


def test_two_runs_of_one_policy_are_told_apart(comparison: Comparison):
    names = labels(comparison.runs)
    assert names[1:] == ["p3", "bytescheduler 1", "bytescheduler 2"]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("width", [78, 80, 100, 140])
def test_everything_fits_and_knobs_are_always_there(comparison: Comparison, width: int):
    text = shown(comparison, width)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    for words in ("T/T*", "speed-up", "exposed", "idle", "images/s", "optimum T*", "slice=4MB", "credit=16MB", "T* ="):
        assert words in flat


def test_a_baseline_that_was_not_asked_for_is_called_tuned():
    found = compare(zoo("resnet50", batch=64), "4x1xV100@7Gbps", ["ddp"], tuned=False, trace=False)
    assert [line.name for line in rows(found)] == ["ddp, tuned", "ddp"]
