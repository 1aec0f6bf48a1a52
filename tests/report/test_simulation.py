import dataclasses
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.live.imbalance import ImbalancePoint
from foretrain.live.routed_loads import RoutedLoads
from foretrain.report import simulation
from foretrain.report.findings import SimulationFindings, numbers, share, step_time
from foretrain.report.simulation_page import imbalance, page, render
from foretrain.report.simulation_timeline import Bar, thin
from foretrain.units import MILLISECOND


def test_what_follows_from_a_simulation(done):
    found = SimulationFindings(done, tokens=9000)
    (rank,) = found.forecast.ranks
    assert found.forecast.iteration_time == 9 * MILLISECOND
    assert step_time(rank) == 9 * MILLISECOND
    assert [share(rank, name) for name in ("compute", "exposed", "waiting", "idle")] == [8 / 9, 1 / 9, 0, 0]
    assert found.tokens_rate == pytest.approx(1e6)
    assert found.bubble == 0
    assert found.left == 58 << 30
    assert [(one.name, one.time, one.share) for one in found.operators] == [
        ("aten::mm", 6 * MILLISECOND, 0.75),
        ("aten::add", 2 * MILLISECOND, 0.25),
    ]
    assert found.path.shares() == {"aten::mm": 6 / 9, "all_reduce of 8 ranks": 3 / 9}
    assert found.loads[0].busiest == pytest.approx(0.25)
    assert sum(load.carried for load in found.loads) == pytest.approx(done.carried.sum())
    assert SimulationFindings(done).tokens_rate is None


def test_operators_are_what_the_ranks_told_where_they_did(unkept):
    assert SimulationFindings(unkept).operators == ()
    first = dataclasses.replace(unkept.forecast.first, by_name={"aten::mm": 30, "aten::add": 10})
    told = dataclasses.replace(unkept, forecast=dataclasses.replace(unkept.forecast, ranks=(first,)))
    assert [(one.name, one.time, one.share) for one in SimulationFindings(told).operators] == [
        ("aten::mm", 30, 0.75),
        ("aten::add", 10, 0.25),
    ]


def test_the_tables_fit_a_narrow_terminal(done, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    simulation.show(SimulationFindings(done, tokens=9000))
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "9.00 ms (95 %: 8.78 ms to 9.23 ms)" in text
    assert "1,000,000 tokens/s, 125,000 tokens/s/GPU" in text
    assert "rank 0 needs 21.00 of 79.00 GiB, 58.00 GiB left" in text
    row = next(line for line in text.splitlines() if line.startswith("0") and "ms" in line)
    assert row.split() == ["0", "8", "9.00", "ms", "88.9", "%", "11.1", "%", "0.0", "%", "0.0", "%", "33.3", "%"]
    assert "…" not in text
    assert "critical path of the last step, which ends on rank 0" in text
    assert "25.0 % used" in text
    assert "odd" in text


def test_the_numbers_hold_all_that_is_shown(done, unkept):
    found = json.loads(json.dumps(numbers(SimulationFindings(done, tokens=9000))))
    assert found["iteration_time"] == 0.009
    assert found["tokens_per_second_per_gpu"] == pytest.approx(125_000)
    assert found["critical_path"]["shares"] == {"aten::mm": 6 / 9, "all_reduce of 8 ranks": 3 / 9}
    assert found["critical_path"]["seconds"] == 0.009
    assert found["memory_left"] == 58 << 30
    assert found["ranks"][0]["shares"]["exposed"] == 1 / 9
    assert found["ranks"][0]["kernel_seconds"] == {
        "measured": 0.006,
        "interpolated": 0,
        "modelled": 0.002,
        "unknown": 0,
    }
    assert max(link["busiest"] for link in found["links"]) == pytest.approx(0.25)
    assert found["folding"] == ["8 ranks in 1 class", "rank 0 stands for 0-7 (8)"]
    assert found["more_live"] == []
    assert numbers(SimulationFindings(unkept))["critical_path"] is None


def test_the_page_and_the_summary_say_why_no_fewer_ranks_are_live(done, tmp_path, capsys):
    found = SimulationFindings(dataclasses.replace(done, more_live=("train.py:3 asks for rank 7",)))
    page(found, tmp_path / "page.html")
    simulation.show(found)

    assert "No fewer are live: train.py:3 asks for rank 7." in (tmp_path / "page.html").read_text("utf-8")
    assert "1 of 8: train.py:3 asks for rank 7" in capsys.readouterr().out


def test_the_page_the_summary_and_the_numbers_name_stand_ins(done, capsys):
    assert "Stand-ins" not in render(SimulationFindings(done))
    forecast = dataclasses.replace(done.forecast, stand_ins=("flash_attn", "triton"))
    found = SimulationFindings(dataclasses.replace(done, forecast=forecast))
    simulation.show(found)

    assert "libraries that are not installed here: flash_attn, triton." in " ".join(render(found).split())
    assert "for flash_attn, triton, not installed here" in capsys.readouterr().out
    assert numbers(found)["stand_ins"] == ["flash_attn", "triton"]


def test_the_page_is_one_file_that_says_what_is_not_real(done, tmp_path):
    found = SimulationFindings(done, tokens=9000)
    page(found, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text("utf-8")
    assert "Values are not real" in text
    assert " an iteration on 8 × H100" in text
    for figure in ("accounts", "timeline", "memory", "steps", "fabric", "inside"):
        assert f'<div class="figure" id="{figure}">' in text
        assert f'id="{figure}-data"' in text
    assert "rank 0 stands for 0-7 (8)" in text
    assert "&lt;b&gt;not real&lt;/b&gt;" in text
    assert 'src="http' not in text
    assert render(found) == text


def test_the_largest_share_has_the_longest_bar_and_names_break_after_underscores(unkept):
    first = dataclasses.replace(unkept.forecast.first, by_name={"aten::mm": 30, "aten::layer_norm<float>": 15})
    one = dataclasses.replace(unkept, forecast=dataclasses.replace(unkept.forecast, ranks=(first,)))
    text = render(SimulationFindings(one))
    assert re.findall(r"var\(--blue\); width: ([\d.]+)%", text) == ["100.0", "50.0"]
    assert "<code>aten::layer_<wbr>norm&lt;float&gt;</code>" in text


def test_the_page_describes_the_cluster_once(done, unkept):
    where = done.forecast.cluster
    for found in (done, unkept):
        assert render(SimulationFindings(found)).count(f"</b>: {where}") == 1
        assert f'"lead">{where}' not in render(SimulationFindings(found))


def test_without_activities_the_page_has_no_timeline(unkept):
    text = render(SimulationFindings(unkept))
    assert 'id="timeline"' not in text
    assert "No activities were kept" in text


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 20), st.integers(1, 30)), min_size=1, max_size=40),
    st.integers(1, 10),
)
def test_thinning_keeps_busy_time(spans, most):
    at, bars = 0, []
    for kind, gap, length in spans:
        bars.append(Bar(kind, at + gap, length, "k", ""))
        at += gap + length
    fewer = thin(bars, at, most)
    assert sum(bar.length for bar in fewer) == sum(bar.length for bar in bars)
    assert len(fewer) <= 2 * most
    assert len(bars) > most or fewer == bars
    assert fewer[0].begin == bars[0].begin


def test_the_loads_of_experts_are_shown_with_what_other_loads_would_take(done, capsys):
    loads = RoutedLoads("loads.csv", None, 2, 1.75, 1.25)
    points = (
        ImbalancePoint(0.0, 0, 8 * MILLISECOND, 1.0, None),
        ImbalancePoint(0.8, 0, 12 * MILLISECOND, 3.0, 1.5),
        ImbalancePoint(0.8, 1, 14 * MILLISECOND, 4.0, 1.75),
        ImbalancePoint(0.8, 2, None, failure="out of memory"),
    )
    found = SimulationFindings(dataclasses.replace(done, loads=loads), curve=points)
    simulation.show(found)
    assert "busiest expert 1.75, busiest rank 1.25 × the mean" in capsys.readouterr().out
    document = json.loads(json.dumps(numbers(found)))
    assert document["experts"]["busiest_rank"] == 1.25
    assert [point["seconds"] for point in document["experts_curve"]] == [0.008, 0.012, 0.014, None]
    figure = imbalance(found)
    mean, draws, own = figure.data
    assert (mean["x"], mean["y"]) == ([1.0, 3.5], [8.0, 13.0])
    assert draws["x"] == [1.0, 3.0, 4.0]
    assert (own["x"], own["y"]) == ([1.75], [9.0])
    text = render(found)
    assert "lognormal(0.8,2): out of memory" in text
    assert "Loads of experts" not in render(SimulationFindings(done))
    assert imbalance(SimulationFindings(done)) is None
