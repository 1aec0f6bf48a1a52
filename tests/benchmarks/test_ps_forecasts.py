"""What is forecast anew of kept measurements has the links, the cores and the times of the run that measured."""

import sys

import pytest

from tests.benchmarks.test_ps import KEPT
from tests.examples.torchrun import ROOT
from tests.processes import module_at


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    monkeypatch.delitem(sys.modules, "ps", raising=False)
    return module_at(ROOT / "benchmarks" / "ps_forecasts.py")


def test_links_and_steps_are_those_that_were_measured(benchmark):
    for cell, result in benchmark.kept(KEPT).results:
        place, work = benchmark.place_of(cell, result["calibration"]), benchmark.workload_of(cell, result["workload"])
        assert str(place) == result["calibration"]["cluster"]
        observed = result["workload"]
        assert work.size == observed["bytes"]
        assert work.compute / 1e12 == pytest.approx(observed["forward"] + observed["backward"])
        assert work.update / 1e12 == pytest.approx(observed["update"])
