"""The benchmark of the parameter server: what it keeps of a cell says when and where that was measured."""

import contextlib
import json
import sys
from datetime import date
from types import ModuleType, SimpleNamespace

import pytest

from foretrain.planner.choice import SERVED
from tests.examples.torchrun import ROOT
from tests.processes import module_at

KEPT = ROOT / "benchmarks" / "data" / "ps.json"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    # Dataclasses look up the module that they are defined in.
    monkeypatch.setitem(sys.modules, "ps", ModuleType("ps"))
    return module_at(ROOT / "benchmarks" / "ps.py")


def test_a_measured_cell_has_its_date_and_machine(benchmark, monkeypatch):
    result = SimpleNamespace(to_dict=lambda: {"cases": []})
    monkeypatch.setattr(benchmark, "lab", lambda setup, plan: contextlib.nullcontext())
    monkeypatch.setattr(benchmark, "on", lambda built, plan: None)
    monkeypatch.setattr(benchmark, "conduct", lambda plan, hosts, progress: [result])
    (cell,) = benchmark.quick()
    found = benchmark.measured(cell, 0.3)
    assert date.fromisoformat(found["date"])
    assert "cores, " in found["machine"]


@pytest.mark.parametrize("old", [False, True])
def test_kept_cells_are_read_and_written_as_they_are_also_without_date_and_machine(benchmark, tmp_path, old):
    content = json.loads(KEPT.read_text(encoding="utf-8"))
    for one in content["details"]["cells"] if old else ():
        one.pop("date")
        one.pop("machine")
    file = tmp_path / "ps.json"
    file.write_text(json.dumps(content))
    cells = benchmark.details(benchmark.kept(file))["cells"]
    assert json.loads(json.dumps(cells)) == content["details"]["cells"]


def test_what_auto_doubts_of_servers_is_what_the_kept_cells_show(benchmark):
    off = benchmark.deviations(benchmark.kept(KEPT))
    assert SERVED.forecast == pytest.approx(off["forecast"], abs=0.005)
    assert SERVED.rate == pytest.approx(off["rate"], abs=0.01)
    assert SERVED.overhead == SERVED.latency == pytest.approx(off["overhead"], abs=0.05)


def test_busy_time_is_counted_in_windows(benchmark):
    def span(lane, start, end):
        return SimpleNamespace(lane=lane, start=start, end=end)

    window = benchmark.WINDOW
    spans = [span("gpu", 0, 2 * window), span("wire", 0, 5 * window), span("gpu", 3 * window, 7 * window // 2)]
    run = SimpleNamespace(begins=(window, 3 * window, 5 * window + 1), timeline=spans)
    assert benchmark.shares(run) == [1, 0, 0.5, 0]
