"""The benchmark of the search: an interrupted one goes on, with the time of all parts; goodput against its oracle."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from tests.examples.torchrun import ROOT
from tests.processes import module_at


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    # Dataclasses look up the module that they are defined in.
    monkeypatch.setitem(sys.modules, "search", ModuleType("search"))
    return module_at(ROOT / "benchmarks" / "search.py")


def test_an_interrupted_search_goes_on_in_its_folder_and_counts_the_time_of_all_parts(benchmark, tmp_path, monkeypatch):
    stores = []

    def search(script, space, cluster, *, exhaustive, store, jobs, progress):
        assert jobs == 2
        stores.append(store)
        if len(stores) == 1:
            progress("whole simulations", 1, 2)  # killed after this, it has been timed until here
            raise KeyboardInterrupt
        return SimpleNamespace(found="found")

    clock = iter([0.0, 30.0, 100.0, 112.0])
    monkeypatch.setattr(benchmark, "search", search)
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: next(clock))
    with pytest.raises(KeyboardInterrupt):
        benchmark.found_in(benchmark.LARGE, tmp_path / "new" / "folder")
    assert benchmark.found_in(benchmark.LARGE, tmp_path / "new" / "folder") == ("found", 42.0)
    assert stores[0] == stores[1]
    assert stores[0].is_dir()


def test_a_space_runs_alone(benchmark):
    arguments = SimpleNamespace(published=False, quick=False, exhaust=None, space=["Llama-3-70B"])
    assert benchmark.chosen(arguments) == [benchmark.LARGE]


def test_a_space_that_there_is_not_ends_the_benchmark(benchmark):
    arguments = SimpleNamespace(published=False, quick=False, exhaust=None, space=["GPT 7B", "LLama"])
    with pytest.raises(SystemExit, match=r"--space 'LLama': no space .*; there are GPT 7B on .*Llama-3-70B"):
        benchmark.chosen(arguments)


def test_goodput_by_the_closed_form_is_within_one_percent_of_the_simulation(benchmark):
    errors = [*benchmark.goodput_errors()]
    assert len(errors) == 72
    assert max(errors) < 0.01
