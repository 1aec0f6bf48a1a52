"""The static picture is valid, escaped, deterministic, and shows both schedules on one time axis."""

import dataclasses
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from foretrain.errors import ConfigError
from foretrain.experiments import Comparison
from foretrain.report import lanes, lanes_svg
from foretrain.report.document import Figure
from foretrain.report.timeline_plot import block, thin

SVG = "{http://www.w3.org/2000/svg}"


def test_svg_is_valid_and_names_what_it_shows(comparison: Comparison):
    named = dataclasses.replace(comparison.workload, name="<b>&\"'")
    runs = [dataclasses.replace(run, workload=named) for run in comparison.runs[:2]]
    text = lanes_svg(runs)
    root = ElementTree.fromstring(text)
    words = " ".join("".join(node.itertext()) for node in root.iter(f"{SVG}text"))
    for word in ("ddp", "p3", "GPU", "T*", "ms"):
        assert word in words
    assert text == lanes_svg(runs)
    assert root.find(f"{SVG}rect").get("fill") == "#ffffff"  # reads on a dark page too


def test_everything_lies_inside(comparison: Comparison):
    root = ElementTree.fromstring(lanes_svg(comparison.runs))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for node in root.iter(f"{SVG}text"):
        assert 0 <= float(node.get("x", 0)) <= width
        assert 0 <= float(node.get("y", 0)) <= height


def test_thinning_keeps_bytes_and_busy_time_and_fills_no_gap(comparison: Comparison):
    for run in comparison.runs:
        for lane, spans in block(run).lanes:
            end = 2 * run.iteration_time
            few = thin(spans, end, 20)
            assert len(few) <= 20 * len({(span.kind, span.step) for span in spans})
            assert sum(span.size for span in few) == sum(span.size for span in spans)
            if lane != "optimizer":  # whose spans may overlap
                assert sum(s.end - s.start for s in few) == sum(s.end - s.start for s in spans)
                for kind in {span.kind for span in few}:
                    same = [span for span in few if span.kind == kind]
                    assert all(a.end <= b.start for a, b in pairwise(same))
            assert thin(spans, end, len(spans)) == spans


def shown_runs(figure: Figure) -> set[int]:
    return {trace["meta"]["run"] for trace in figure.data if "meta" in trace and trace["visible"]}


def test_a_figure_shows_what_is_asked_for_over_as_long_as_that_takes(comparison: Comparison):
    runs = sorted(comparison.runs, key=lambda run: run.iteration_time)
    figure = lanes(runs, shown=runs[:1])
    assert shown_runs(figure) == {0}
    assert tuple(figure.layout["xaxis"]["1"]["range"]) == pytest.approx((0, 2.02 * runs[0].iteration_time / 1e9))
    everything = lanes(runs)
    assert shown_runs(everything) == set(range(len(runs)))


def test_runs_of_one_policy_are_told_apart(comparison: Comparison):
    for words in (lanes_svg(comparison.runs), str(lanes(comparison.runs).layout["yaxis"]["1"]["ticktext"])):
        assert "bytescheduler 1" in words
        assert "bytescheduler 2" in words


def test_no_runs_are_refused():
    for draw in (lanes, lanes_svg):
        with pytest.raises(ConfigError, match="is empty"):
            draw([])
