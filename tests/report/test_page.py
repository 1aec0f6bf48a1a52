"""A comparison: the page is one file, whole, offline, and draws what was compared; the table fits any width."""

import dataclasses
import io
import re

import pytest
from rich.console import Console

from foretrain.experiments import Comparison, compare
from foretrain.report import bars, curves, summary
from foretrain.report.page import render
from foretrain.report.table import labels, ranking, rows
from foretrain.units import format_time
from foretrain.workload import zoo


def test_nothing_is_fetched_and_the_script_is_there_once(comparison: Comparison):
    html = render(comparison)
    assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)\s*=\s*[\"']?(https?:)?//", html)
    assert "@import" not in html
    assert html.count("const Charts =") == 1
    assert len(html) < 800_000
    assert html == render(comparison)


def test_names_cannot_break_out_of_the_page(comparison: Comparison):
    named = dataclasses.replace(comparison.workload, name="</script><script>alert(1)</script>")
    html = render(dataclasses.replace(comparison, workload=named))
    assert "<script>alert(1)" not in html


def test_bars_hold_every_run_and_end_at_its_time(comparison: Comparison):
    figure = bars(comparison)
    runs = ranking(comparison)
    assert figure.data[0]["y"] == labels(runs)
    ends = [compute + exposed for compute, exposed in zip(figure.data[0]["x"], figure.data[1]["x"], strict=True)]
    assert ends == pytest.approx([run.iteration_time / 1e9 for run in runs])


def test_curves_hold_every_schedule_and_the_optimum(comparison: Comparison):
    sweep = comparison.sweep
    assert sweep is not None
    figure = curves(sweep)
    drawn = {trace["name"]: trace["y"] for trace in figure.data if trace["panel"] == 1}
    assert drawn["T*"] == pytest.approx([time / 1e9 for time in sweep.optimum])
    for name, times in sweep.times.items():
        assert drawn[name] == pytest.approx([time / 1e9 for time in times])


def shown(comparison: Comparison, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(summary(comparison))
    return out.getvalue()


def test_rows_are_sorted_and_complete(comparison: Comparison):
    lines, runs = rows(comparison), ranking(comparison)
    asked = [run.schedule for run in comparison.runs]
    assert len(lines) == len(asked) + (comparison.baseline.schedule not in asked)
    assert [run.iteration_time for run in runs] == sorted(run.iteration_time for run in runs)
    assert comparison.advice.worth_it == any("best" in line.marks for line in lines)
    assert comparison.advice.worth_it != any("keep" in line.marks for line in lines)
    assert [line.iteration for line in lines] == [format_time(run.iteration_time) for run in runs]
    assert sum("baseline" in line.marks for line in lines) == 1


@pytest.mark.parametrize("width", [78, 80, 100, 140])
def test_everything_fits_and_knobs_are_always_there(comparison: Comparison, width: int):
    text = shown(comparison, width)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    for words in ("T/T*", "speed-up", "exposed", "idle", "images/s", "optimum T*", "slice=4MB", "T* ="):
        assert words in flat


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_number_is_cut_where_a_schedule_has_a_long_name(width: int):
    found = compare(zoo("resnet50"), "4x1xV100@7Gbps", ["prophet", "largest_tail_first"], tuned=False, trace=False)
    text = shown(found, width)
    assert "…" not in text
    (line,) = [line for line in rows(found) if line.name == "largest_tail_first"]
    numbers = [line.iteration, line.rate, line.speedup, line.ratio, line.exposed, line.idle]
    assert " ".join(numbers) in " ".join(text.split())


def test_knobs_at_their_defaults_are_left_out():
    found = compare(
        zoo("resnet50", batch=64), "4x1xV100@7Gbps", ["prophet", "p3(slice=160kB)"], tuned=False, trace=False
    )
    assert {line.name: bool(line.knobs) for line in rows(found)} == {"ddp": True, "prophet": False, "p3": False}
    untuned = dataclasses.replace(found, baseline=found.runs[0])
    assert all("knobs" not in shown(untuned, width) for width in (80, 140))


def test_a_baseline_that_was_not_asked_for_is_called_tuned():
    found = compare(zoo("resnet50", batch=64), "4x1xV100@7Gbps", ["ddp"], tuned=False, trace=False)
    assert [line.name for line in rows(found)] == ["ddp, tuned", "ddp"]
