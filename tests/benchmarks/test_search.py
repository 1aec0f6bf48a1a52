"""The benchmark of the search: an interrupted one goes on, with the time of all parts; goodput against its oracle."""

import argparse
import dataclasses
import itertools
import sys
from statistics import fmean, median
from types import ModuleType, SimpleNamespace

import pytest
from msgspec.structs import replace

from foretrain.recipe_search.comparison import ratio
from foretrain.recipe_search.space import declared, expand
from tests.examples.torchrun import ROOT
from tests.processes import module_at
from tests.recipe_search.test_goodput import ACCOUNT


@pytest.fixture
def program(monkeypatch):
    """Load a benchmark by its name."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])

    def load(name):
        # Dataclasses look up the module that they are defined in.
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        return module_at(ROOT / "benchmarks" / f"{name}.py")

    return load


@pytest.fixture
def benchmark(program):
    return program("search")


def test_an_interrupted_search_goes_on_in_its_folder_and_counts_the_time_of_all_parts(benchmark, tmp_path, monkeypatch):
    stores = []

    def search(script, space, cluster, *, module, exhaustive, store, jobs, progress):
        assert jobs == 2
        assert not module
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


def _arguments(benchmark, *words):
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    benchmark.own_options(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "cases"),
    [
        (("--space", "Llama-3-70B"), ["LARGE"]),
        (("--quick",), ["QUICK"]),
        (("--quick", "--exhaust", "folder"), ["QUICK"]),
        (("--torchtitan", "checkout", "--store", "folder"), ["TORCHTITAN"]),
        (("--published",), []),
    ],
)
def test_a_space_runs_alone(benchmark, words, cases):
    arguments = _arguments(benchmark, *words)
    benchmark.check(arguments)
    assert [*benchmark.chosen(arguments)] == [getattr(benchmark, case) for case in cases]


def test_a_space_that_there_is_not_ends_the_benchmark(benchmark):
    arguments = _arguments(benchmark, "--space", "GPT 7B", "--space", "LLama")
    with pytest.raises(SystemExit, match=r"--space 'LLama': no space .*; there are GPT 7B on .*Llama-3-70B"):
        benchmark.chosen(arguments)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--quick", "--space", "GPT"), "--quick and --space"),
        (("--published", "--quick"), "--quick and --published"),
        (("--torchtitan", "checkout", "--exhaust", "folder"), "--exhaust and --torchtitan"),
        (("--exhaust", "folder", "--store", "other"), "--exhaust and --store"),
    ],
)
def test_options_that_contradict_each_other_are_refused(benchmark, words, named):
    with pytest.raises(SystemExit, match=f"^{named}: give one of them$"):
        benchmark.check(_arguments(benchmark, *words))


def test_torchtitans_space_has_smaller_runs_of_fewer_layers_and_tokens(benchmark):
    case = benchmark.TORCHTITAN
    space = expand(declared(case.space), case.script, world=64, gpus=8)
    assert len(space.recipes) == 288
    assert set(space.varying) == {"tp", "replicate", "sequences", "recompute", "reshard"}
    configurations = {word for one in space.recipes for word in one.argv if "--config" in word}
    assert configurations == {"--config=llama3_70b_80"}
    runs = [run.argv for one in space.recipes for run in space.short_runs(one)]
    assert {word for run in runs for word in run if "--config" in word} == {
        "--config=llama3_70b_2",
        "--config=llama3_70b_4",
    }


def test_a_configuration_of_torchtitan_keeps_as_many_layers_as_its_name_says(benchmark, monkeypatch):
    registry = ModuleType("torchtitan.models.llama3.config_registry")
    registry.llama3_70b = lambda: SimpleNamespace(
        model_spec=SimpleNamespace(model=SimpleNamespace(layers=[*range(80)]))
    )
    llama = ModuleType("torchtitan.models.llama3")
    llama.config_registry = registry
    trainer = ModuleType("torchtitan.trainer")
    trainer.Trainer = SimpleNamespace(Config=object)
    for module in (ModuleType("torchtitan"), ModuleType("torchtitan.models"), llama, registry, trainer):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    layers = module_at(benchmark.SPACE_FILES / "torchtitan_layers.py")
    for number in (1, 4, 80):
        made = getattr(layers, f"llama3_70b_{number}")()
        assert made.model_spec.model.layers == [*range(number)]
    for name in ("llama3_70b_0", "llama3_70b_81", "llama3_70b_-1", "llama3_70b", "llama3_7b_4"):
        assert not hasattr(layers, name)


def test_rankings_that_a_model_computed_do_not_count(benchmark):
    rankings = [*benchmark.published()]
    assert {one.computed for one in rankings if "vtrain-single" in one.name} == {True}
    measured = [one for one in rankings if not one.computed]
    assert {one.name.partition(",")[0] for one in measured} == {"vtrain-multi", "simumax-b200"}
    results = benchmark.of_rankings(rankings)
    assert results == benchmark.of_rankings(measured)
    assert results["spearman_median"] == median(one.rank for one in measured)
    assert results["top3_share"] == fmean(one.top for one in measured)
    assert all(one.chance == 3 / one.runs for one in rankings)


def test_a_measured_ratio_is_in_the_interval_that_a_search_tells_of_a_comparison(benchmark):
    rankings = sys.modules[benchmark.published.__module__]
    runs = next(runs for name, runs in rankings.groups() if "vtrain-multi" in name)[:2]
    slow, fast = sorted(runs, key=lambda one: one.forecast, reverse=True)
    accounts = dict(zip((slow.row.id, fast.row.id), (ACCOUNT, replace(ACCOUNT, time=5.0)), strict=True))
    told = ratio(accounts[slow.row.id], accounts[fast.row.id], 0.477)
    scale = fast.row.tokens / slow.row.tokens
    for off, inside in ((0.0, True), (0.99, True), (1.01, False), (-1.01, False)):
        measured = dataclasses.replace(slow, measured=fast.measured * scale * (told.value + off * told.error))
        assert rankings.in_interval(measured, fast, accounts) == inside


def test_a_published_recipe_is_a_point_of_the_space_around_it_with_the_published_command(program):
    recipes = program("published_recipes")
    rows = {row.id: row for row in recipes.read()[0]}
    for tuned in recipes.TUNED:
        row = rows[tuned.run]
        script, own = recipes.script_of(tuned, row)
        space = expand(declared(tuned.space), script, world=row.ranks, gpus=8)
        (found,) = space.find(",".join(f"{name}={value}" for name, value in own.items()))
        assert 16 <= len(space.recipes) <= 100
        assert found.number < len(space.recipes)
        assert found.tokens == row.tokens
        asked, published = _flags(found.argv[1:]), _flags(row.argv)
        layers = str(tuned.space["values"]["layers"])
        assert asked.items() >= published.items()
        assert set(asked.items() - published.items()) <= {
            *(("--tp", "1"), ("--pp", "1"), ("--vp", "1"), ("--recompute", "none"), ("--pieces", "1")),
            ("--layers", layers),
        }


def _flags(words):
    pairs = itertools.pairwise([*words, "--"])
    return {flag: "" if value.startswith("--") else value for flag, value in pairs if flag.startswith("--")}


def test_goodput_by_the_closed_form_is_within_one_percent_of_the_simulation(benchmark):
    errors = [*benchmark.goodput_errors()]
    assert len(errors) == 72
    assert max(errors) < 0.01
