"""The benchmark of the lab: what its RESULT line has of the real transformer, and what its quick form measures."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from foretrain.simulation import bound
from foretrain.units import MILLISECOND
from tests.examples.torchrun import ROOT
from tests.processes import module_at


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    # Dataclasses look up the module that they are defined in.
    monkeypatch.setitem(sys.modules, "lab", ModuleType("lab"))
    return module_at(ROOT / "benchmarks" / "lab.py")


def test_of_the_real_transformer_the_best_schedule_counts_and_auto_also_by_itself(benchmark):
    threads = {"foretrain-coordinator": 3 * MILLISECOND, "foretrain-updates": 4 * MILLISECOND}
    ratios = {"bytescheduler": 0.98, "prophet": 1.04, "auto": 1.01}
    cases = {name: SimpleNamespace(ratio=ratio, threads=threads) for name, ratio in ratios.items()}
    result = SimpleNamespace(
        experiment=SimpleNamespace(name="transformer", jitter=0, straggler=0, workload=None),
        baseline="DDP",
        best=cases["prophet"],
        find=cases.get,
        speedup=lambda case: case.ratio,
        measured=(),
    )
    numbers = benchmark.values([result])
    assert numbers["transformer_vs_best_ddp"] == 1.04
    assert numbers["transformer_auto_vs_best_ddp"] == 1.01
    assert numbers["worst_vs_best_ddp"] == 0.98
    assert numbers["transformer_threads_ms"] == pytest.approx(7)


def test_the_full_grid_measures_the_real_transformer_under_auto(benchmark):
    (cell,) = [cell for cell in benchmark.full() if cell.model == "transformer"]
    assert "auto" in cell.options["schedules"]


def test_quick_cells_are_cells_of_the_grid_with_steps_as_long_as_there(benchmark):
    def place(cell):
        return cell.model, cell.hosts, cell.rate, cell.options["ratio"], cell.options.get("straggler", 0)

    def optimum(cell):
        return bound(cell.experiment.workload, f"{cell.hosts} workers @ {cell.rate}").time

    grid = {place(cell): cell for cell in reversed(benchmark.full())}  # of several, the first
    for cell in benchmark.quick():
        assert optimum(cell) >= optimum(grid[place(cell)])
        assert cell.options["iterations"] >= 15
        assert {case.kind for case in cell.experiment.cases} == {"ddp", "attach"}
