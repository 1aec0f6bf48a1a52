"""Strategy of a search, with a closed form in place of simulations: what it runs, what it finds, what it says."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from foretrain.experiments import result_store
from foretrain.experiments.result_store import ResultStore
from foretrain.live.rank_processes import OutOfMemory
from foretrain.recipe_search import evaluation
from foretrain.recipe_search.api import _compared, step_time
from foretrain.recipe_search.comparison import Ratio, bound_by, front, interval, ratio, sigma, why_slower
from foretrain.recipe_search.evaluation import (
    Account,
    RecipeRun,
    RunResult,
    RunSetting,
    _account,
    digest_of,
    last_words,
)
from foretrain.recipe_search.space import declared, expand
from foretrain.recipe_search.strategy import NoRecipe, Search, SearchFindings
from tests.report.conftest import simulated as simulated_ranks

GIB = 2.0**30
SPACE = {
    "values": {"tp": [1, 2, 4, 8], "pp": [1, 2, 4], "mbs": [1, 2, 4]},
    "derived": {"dp": "world // (tp * pp)"},
    "require": ["tp * pp <= world", "batch % (dp * mbs) == 0", "batch // (dp * mbs) >= pp"],
    "flags": {"batch": "--batch"},
    "tokens": "batch",
    "short_from": 0,
    "batch": "batch",
    "memory": {"grows": ["mbs"]},
    "short": {"batch": "dp * mbs * pp"},
}
SCRIPT = ("train.py", "--batch", "512", "--tp", "{tp}", "--pp", "{pp}", "--mbs", "{mbs}")
WORLD = 16


def account(batch: int, tp: int, pp: int, mbs: int, bend: float = 0.0) -> Account:
    """A pipeline of ``batch / (dp * mbs)`` micro-batches; ``bend`` makes it less than linear."""
    micro = batch // (WORLD // (tp * pp) * mbs)
    work = mbs * (1 + 0.1 * math.log2(tp)) / (tp * pp) + 0.05
    compute = micro * work
    waiting = (pp - 1) * work
    exposed = 0.2 * micro * mbs * math.log2(tp) / tp + 0.3 + bend * math.sqrt(micro)
    return Account(
        time=compute + waiting + exposed, compute=compute, exposed=exposed, waiting=waiting, idle=0.0,
        spread=0.02 * compute, flops=1e12 * batch,
        kernels={"aten::mm": 0.7 * compute, "aten::native_layer_norm": 0.1 * compute, "aten::add": 0.2 * compute},
        repeated=0.8 * compute, reserved=(8 + 10 * mbs / tp) * GIB, state=GIB, carried=0.1, launches=100.0 * micro,
        allocated=(8 + 10 * mbs / tp) * GIB,
    )  # fmt: skip


class Workers:
    """A pool that computes in place of simulating; ``asked`` are the argument lists."""

    count = 2

    def __init__(self, answer: Callable[[RecipeRun], RunResult]) -> None:
        self.answer, self.asked = answer, []

    @contextmanager
    def results(self, work: object, items: Iterable[RecipeRun]) -> Iterator[Iterator[RunResult]]:
        def made() -> Iterator[RunResult]:
            for run in items:
                self.asked.append(run)
                yield self.answer(run)

        yield made()


def simulated(run: RecipeRun, usable: float = 80.0, bend: float = 0.0) -> RunResult:
    batch, tp, pp, mbs = (int(run.argv[place]) for place in (2, 4, 6, 8))
    found = account(batch, tp, pp, mbs, bend)
    if found.reserved > usable * GIB:
        return RunResult(run.id, "memory", reason="out of memory")
    return RunResult(run.id, "done", found, usable=int(usable * GIB), cpu=found.launches / 1000)


def searched(
    folder: Path, answer: Callable[[RecipeRun], RunResult] = simulated, space: dict[str, Any] = SPACE, **options: Any
) -> tuple[SearchFindings, Workers]:
    recipes = expand(declared(space), options.pop("script", SCRIPT), WORLD, 8)
    pool = Workers(answer)
    also = recipes.find(options.pop("also")) if "also" in options else ()
    folder.mkdir(exist_ok=True)
    with ResultStore(folder / "store", RunResult) as store:
        made = Search(recipes, RunSetting("dgx"), step_time, store, pool, also=also, **options)  # pyright: ignore
        return made.run(), pool


@pytest.mark.parametrize("bend", [0.0, 0.05])
def test_the_best_is_found_with_fewer_whole_simulations(tmp_path: Path, bend: float) -> None:
    answer = lambda run: simulated(run, bend=bend)  # noqa: E731
    every, _ = searched(tmp_path / "a", answer, exhaustive=True)
    found, pool = searched(tmp_path / "b", answer)
    assert found.winner.recipe == every.winner.recipe
    assert found.winner.account == every.winner.account
    whole = [run for run in pool.asked if run.steps == found.space.file.steps]
    assert len(whole) < len(every.candidates) / 3
    assert found.cpu < every.cpu / 2


def test_what_is_linear_is_extended_without_error(tmp_path: Path) -> None:
    found, _ = searched(tmp_path)
    assert found.error < 1e-9
    for one in found.candidates:
        if one.status == "estimated":
            values = [int(one.recipe.names[name]) for name in ("tp", "pp", "mbs")]
            assert one.account is not None
            assert one.account.time == pytest.approx(account(512, *values).time)


def test_no_recipe_that_a_bound_excludes_is_the_best(tmp_path: Path) -> None:
    found, _ = searched(tmp_path)
    best = step_time(
        account(512, *(int(found.winner.recipe.names[name]) for name in ("tp", "pp", "mbs"))), found.winner.recipe
    )
    beaten = [one for one in found.candidates if one.status == "beaten"]
    assert beaten
    for one in beaten:
        values = [int(one.recipe.names[name]) for name in ("tp", "pp", "mbs")]
        assert step_time(account(512, *values), one.recipe) >= one.bound > best
        assert one.reason.startswith(f"at least {one.bound / best:.2f} times the best, by ")


def test_bounds_that_are_extended_in_layers_need_a_margin(tmp_path: Path) -> None:
    """A recipe a little slower by its bound than the best is simulated where that bound is itself a forecast."""
    best, statuses = {}, {}
    for batch in ("batch", None):
        found, _ = searched(tmp_path / str(batch))
        made = Search(found.space, RunSetting("dgx"), step_time, None, None)  # pyright: ignore
        if batch is None:
            made._space = dataclasses.replace(found.space, file=structs.replace(found.space.file, batch=None))
        made.candidates[0].status, made.candidates[0].account = "whole", found.winner.account
        best[batch] = made._best()
        made.candidates[1].bound, made.candidates[2].bound = 1.01 * best[batch], 1.2 * best[batch]
        made._going()
        statuses[batch] = [one.status for one in made.candidates[1:3]]
    assert statuses == {"batch": ["beaten", "beaten"], None: ["open", "beaten"]}


def test_neighbours_that_need_more_memory_are_not_run(tmp_path: Path) -> None:
    found, pool = searched(tmp_path, lambda run: simulated(run, usable=20.0))
    out = [one for one in found.candidates if one.status == "memory"]
    skipped = [one for one in out if "needs more than" in one.reason]
    assert {one.recipe.values["mbs"] for one in skipped} == {4}
    asked = {(run.argv[4], run.argv[6], run.argv[8]) for run in pool.asked}
    assert not any((str(one.recipe.values["tp"]), str(one.recipe.values["pp"]), "4") in asked for one in skipped)
    assert found.winner.status == "whole"


@pytest.mark.parametrize("values", [("none", "full"), ["auto", 0], range(2)])
def test_values_without_an_order_of_memory_are_all_tried(tmp_path: Path, values: Any) -> None:
    space = {"values": {"recompute": values, "mbs": (1, 2)}, "memory": {"grows": ["mbs"]}}
    first = str(values[0])

    def answer(run: RecipeRun) -> RunResult:
        return RunResult(run.id, "memory") if run.argv[1] == first else simulated(run)

    def simulated(run: RecipeRun) -> RunResult:
        return RunResult(run.id, "done", account(512, 1, 1, int(run.argv[2])), usable=80 << 30)

    found, pool = searched(tmp_path, answer, space, script=("train.py", "{recompute}", "{mbs}"))
    assert {str(one.recipe.values["recompute"]) for one in found.ranked} == {str(values[1])}
    assert [run.argv[1:] for run in pool.asked if run.argv[1] == first] == [(first, "1")]


def test_what_simulations_warned_of_is_told_once(tmp_path: Path) -> None:
    def answer(run: RecipeRun) -> RunResult:
        return structs.replace(simulated(run), warnings=("the script made one step",), unknown=("aten::_fft_r2c",))

    found, _ = searched(tmp_path, answer, exhaustive=True)
    whole = len(found.ranked)
    assert f"the script made one step (in {whole} of {whole} whole simulations)" in found.warnings
    assert any("charged for their bytes" in one and "aten::_fft_r2c" in one for one in found.warnings)


def test_progress_counts_what_is_simulated_and_not_what_was_kept(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    space = {**SPACE, "short": {}, "batch": None}
    searched(tmp_path, space={**space, "require": [*SPACE["require"], "tp < 4"]}, exhaustive=True)
    _, pool = searched(
        tmp_path, space=space, exhaustive=True, progress=lambda _, done, total: told.append((done, total))
    )
    assert told[0] == (0, len(pool.asked))
    assert told[-1] == (len(pool.asked), len(pool.asked))


def test_what_would_need_too_much_memory_takes_its_neighbours_along(tmp_path: Path) -> None:
    space = {
        "values": {"mbs": [1, 2, 4, 8]}, "flags": {"layers": "--layers"}, "short": {"layers": "2"}, "short_from": 0,
        "memory": {"grows": ["mbs"]},
    }  # fmt: skip
    recipes = expand(declared(space), ("train.py", "--layers", "32", "--mbs", "{mbs}"), WORLD, 8)

    def answer(run: RecipeRun) -> RunResult:
        layers, mbs = float(run.argv[2]), float(run.argv[4])
        found = structs.replace(
            account(512, 1, 1, 1),
            time=layers * (1 + mbs),
            allocated=layers * mbs * GIB,
            reserved=4 * layers * mbs * GIB,
        )
        return RunResult(run.id, "done", found, usable=int(80 * GIB))

    pool = Workers(answer)
    with ResultStore(tmp_path / "store", RunResult) as store:
        found = Search(recipes, RunSetting("dgx"), step_time, store, pool).run()  # pyright: ignore
    assert [one.status for one in found.candidates] == ["whole", "whole", "memory", "memory"]
    assert found.candidates[2].reason == "needs 128.0 of 80.0 GiB, extended from smaller runs"
    assert found.candidates[3].reason == "needs more than mbs=4, which has too little memory"
    assert "8" not in {run.argv[4] for run in pool.asked}


def test_memory_is_told_before_runs_with_more_micro_batches(tmp_path: Path) -> None:
    space = SPACE | {
        "flags": {"batch": "--batch", "layers": "--layers"},
        "short": {"batch": "dp * mbs * pp", "layers": "4"},
    }

    def answer(run: RecipeRun) -> RunResult:
        batch, tp, pp, mbs, layers = (int(run.argv[place]) for place in (2, 4, 6, 8, 10))
        found = account(batch, tp, pp, mbs)
        memory = found.allocated * layers / 32
        scaled = structs.replace(found, time=found.time * layers, allocated=memory, reserved=memory)
        return RunResult(run.id, "done", scaled, usable=int(20 * GIB))

    recipes = expand(declared(space), (*SCRIPT, "--layers", "32"), WORLD, 8)
    pool = Workers(answer)
    with ResultStore(tmp_path / "store", RunResult) as store:
        found = Search(recipes, RunSetting("dgx"), step_time, store, pool).run()  # pyright: ignore
    out = [one for one in found.candidates if one.reason.endswith("extended from smaller runs")]
    assert any(len(one.pieces) == 2 for one in out)
    for one in out:
        values = {name: int(one.recipe.values[name]) for name in ("tp", "pp", "mbs")}
        assert account(512, **values).allocated > 20 * GIB


def test_ones_own_recipe_is_simulated_whole_and_first_whatever_the_budget(tmp_path: Path) -> None:
    for name, deadline in (("a", math.inf), ("b", 0.0)):
        found, pool = searched(tmp_path / name, also="tp=8,pp=1,mbs=4", deadline=deadline)
        (own,) = [one for one in found.candidates if one.recipe.values == {"tp": 8, "pp": 1, "mbs": 4}]
        assert own.status == "whole"
        assert (pool.asked[0].argv, pool.asked[0].steps) == (own.recipe.argv, found.space.file.steps)
        assert (len(pool.asked) == 1, found.finished) == (not deadline, bool(deadline))


def test_of_several_own_recipes_the_best_is_simulated_whole(tmp_path: Path) -> None:
    found, pool = searched(tmp_path, also="tp=8,pp=1")
    own = [one for one in found.candidates if (one.recipe.values["tp"], one.recipe.values["pp"]) == (8, 1)]
    best = min(own, key=lambda one: account(512, 8, 1, int(one.recipe.values["mbs"])).time)
    assert best.status == "whole"
    assert {(run.argv[4], run.argv[6]) for run in pool.asked[:7]} == {("8", "1")}
    assert _compared(found, [one.recipe for one in own]) is best


def test_ones_own_recipe_may_have_values_that_the_space_does_not_list(tmp_path: Path) -> None:
    answer = lambda run: simulated(run, usable=70.0)  # noqa: E731
    found, _ = searched(tmp_path / "a", answer, also="tp=1,pp=1,mbs=8")  # which has too little memory
    *listed, own = found.candidates
    assert (own.status, own.recipe.number, own.recipe.argv[8]) == ("memory", len(found.space.recipes), "8")
    assert not any("mbs=8" in one.reason for one in listed)  # of its neighbours the space says nothing
    fresh, _ = searched(tmp_path / "b", answer)
    assert found.winner.recipe == fresh.winner.recipe
    fixed = {**SPACE, "values": SPACE["values"] | {"mbs": 1}}
    larger, _ = searched(tmp_path / "c", lambda run: simulated(run, usable=100.0), fixed, also="tp=1,pp=1,mbs=8")
    assert larger.candidates[-1].status == "whole"
    assert larger.candidates[-1].recipe.values == {"tp": 1, "pp": 1, "mbs": 8}


def test_an_interrupted_search_goes_on(tmp_path: Path) -> None:
    runs = 0

    def stop(run: RecipeRun) -> RunResult:
        nonlocal runs
        runs += 1
        if runs > 10:
            raise KeyboardInterrupt
        return simulated(run)

    with pytest.raises(KeyboardInterrupt):
        searched(tmp_path, stop)
    found, pool = searched(tmp_path)
    fresh, all_of_them = searched(tmp_path / "other")
    assert found.winner.recipe == fresh.winner.recipe
    assert len(pool.asked) == len(all_of_them.asked) - 10
    again, none = searched(tmp_path)
    assert not none.asked
    assert again.winner.recipe == found.winner.recipe


def test_a_search_whose_disk_was_full_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, left = result_store.write_atomically, iter(range(10))

    def full(path: Path, data: bytes) -> None:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    monkeypatch.setattr(result_store, "write_atomically", full)
    with pytest.raises(OSError, match="No space left on device"):
        searched(tmp_path)
    monkeypatch.undo()
    found, pool = searched(tmp_path)
    fresh, all_of_them = searched(tmp_path / "other")
    assert found.winner.recipe == fresh.winner.recipe
    assert len(pool.asked) == len(all_of_them.asked) - 10


def test_what_failed_is_tried_again_when_a_search_goes_on(tmp_path: Path) -> None:
    def failing(run: RecipeRun) -> RunResult:
        return RunResult(run.id, "invalid", reason="ModuleNotFoundError") if run.argv[4] == "8" else simulated(run)

    first, _ = searched(tmp_path, failing)
    assert {one.recipe.values["tp"] for one in first.candidates if one.status == "invalid"} == {8}
    found, pool = searched(tmp_path)
    assert {run.argv[4] for run in pool.asked} == {"8"}
    assert not any(one.status == "invalid" for one in found.candidates)


def test_a_flag_that_the_script_does_not_know_ends_the_search_early(tmp_path: Path) -> None:
    def answer(run: RecipeRun) -> RunResult:
        return RunResult(run.id, "invalid", reason=f"train.py: error: unrecognized arguments: --tp {run.argv[4]}")

    with pytest.raises(NoRecipe, match=r"8 recipes, with every value of tp, pp, mbs, fail in the same words: .*unrec"):
        searched(tmp_path, answer)
    space = {"values": {"shard": ["ddp", "fsdp", "hsdp"], "mbs": list(range(9))}}
    with pytest.raises(NoRecipe, match=r"fail in the same words"):
        searched(tmp_path, answer, space, script=("train.py", "--mbs", "{mbs}", "--shrad", "{shard}"))


@pytest.mark.parametrize("valid", [(1, 2, 4), (4,)])
def test_a_value_that_the_script_refuses_does_not_end_the_search(tmp_path: Path, valid: tuple[int, ...]) -> None:
    space = {
        "values": {"tp": [1, 2, 4, 8], "pp": [1, 2], "mbs": [1, 2, 4]}, "flags": {"batch": "--batch"},
        "memory": {"grows": ["mbs"], "shrinks": ["tp"]},
    }  # fmt: skip

    def answer(run: RecipeRun) -> RunResult:
        tp = int(run.argv[4])
        reason = f"ValueError: 4 key-value heads cannot be divided over tp={tp}"
        return simulated(run) if tp in valid else RunResult(run.id, "invalid", reason=reason)

    found, pool = searched(tmp_path, answer, space)
    assert {run.argv[4] for run in pool.asked[:6]} == {"8"}  # those that need least memory come first
    assert {one.recipe.values["tp"] for one in found.candidates if one.status == "whole"} == {*valid}
    assert {one.recipe.values["tp"] for one in found.candidates if one.status == "invalid"} == {1, 2, 4, 8} - {*valid}


def test_a_space_in_which_nothing_fits_says_what_kills_most(tmp_path: Path) -> None:
    with pytest.raises(NoRecipe, match=r"run out of memory and 0 fail.*Most run out of GPU memory, e\.g\. tp="):
        searched(tmp_path, lambda run: simulated(run, usable=5.0))


def test_where_nothing_fits_what_most_memory_is_for_is_counted(tmp_path: Path) -> None:
    def too_large(run: RecipeRun) -> RunResult:
        parts = {"activations": 70 << 30, "parameters": (80 if run.argv[6] == "1" else 3) << 30}
        trace = SimpleNamespace(
            rank=0, steps=[], memory={"out_of_memory": "", "reserved": 75 << 30, "breakdown": parts}
        )
        return RunResult(run.id, "memory", reason=str(OutOfMemory((trace,))))  # pyright: ignore[reportArgumentType]

    with pytest.raises(NoRecipe) as refused:
        searched(tmp_path, too_large, exhaustive=True)
    found = re.search(r"as far as it is known: activations in (\d+), parameters in (\d+)$", str(refused.value))
    assert found is not None
    assert int(found[1]) > int(found[2]) > 0


@pytest.mark.parametrize(("tokens", "batches"), [(True, 2), (False, 2), (False, 1)])
def test_steps_of_different_batches_are_warned_of_where_their_tokens_are_not_known(
    tmp_path: Path, tokens: bool, batches: int
) -> None:
    space = {key: value for key, value in SPACE.items() if key not in ("flags", "tokens", "short", "batch")}
    space["values"] = SPACE["values"] | {"batch": [256, 512][:batches]}
    space |= {"tokens": "batch"} if tokens else {}
    script = ("train.py", "--batch", "{batch}", *SCRIPT[3:])
    found, _ = searched(tmp_path, space=space, script=script)
    warned = [warning for warning in found.warnings if "differ in their arithmetic, by up to 2 times" in warning]
    assert len(warned) == (batches == 2 and not tokens)


def test_a_flag_that_makes_no_difference_is_warned_of(tmp_path: Path) -> None:
    def ignoring(run: RecipeRun) -> RunResult:
        found = account(512, int(run.argv[4]), int(run.argv[6]), 1)
        return RunResult(run.id, "done", found, usable=int(80 * GIB))

    found, _ = searched(tmp_path, ignoring, exhaustive=True)
    assert found.warnings == ("mbs makes no difference: its values 1, 2, 4 gave identical simulations; is it ignored?",)


def test_values_that_a_script_does_not_tell_apart_are_warned_of_beside_others_that_it_does(tmp_path: Path) -> None:
    def ignoring(run: RecipeRun) -> RunResult:
        found = account(512, int(run.argv[4]), int(run.argv[6]), max(int(run.argv[8]), 2))
        return RunResult(run.id, "done", found, usable=int(80 * GIB))

    found, _ = searched(tmp_path, ignoring, exhaustive=True)
    assert found.warnings == ("mbs: 1 and 2 gave identical simulations; does the script tell them apart?",)


def test_values_that_differ_once_are_not_warned_of(tmp_path: Path) -> None:
    def differing(run: RecipeRun) -> RunResult:
        tp, pp, mbs = (int(run.argv[place]) for place in (4, 6, 8))
        found = account(512, tp, pp, mbs if (tp, pp) == (2, 2) else 1)
        return RunResult(run.id, "done", found, usable=int(80 * GIB))

    found, _ = searched(tmp_path, differing, exhaustive=True)
    assert found.warnings == ()


def test_a_budget_ends_a_search_with_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(NoRecipe, match="the budget was over after 0 simulations"):
        searched(tmp_path, deadline=0.0)


def test_what_a_worker_would_begin_after_the_budget_is_not_simulated(tmp_path: Path) -> None:
    late = RecipeRun(RunSetting("no cluster"), ("no script.py",), 3, until=time.time() - 1)
    assert evaluation.run(late) == RunResult(late.id, "late")
    asked: list[RecipeRun] = []

    def answer(run: RecipeRun) -> RunResult:
        asked.append(run)
        return simulated(run) if len(asked) < 3 else RunResult(run.id, "late")

    deadline = time.monotonic() + 600
    found, _ = searched(tmp_path, answer, exhaustive=True, deadline=deadline)
    assert (found.runs, found.finished, len(found.ranked)) == (2, False, 2)
    assert all(one.until == pytest.approx(time.time() + 600, abs=60) for one in asked)
    with ResultStore(tmp_path / "store", RunResult) as store:
        assert {one.status for one in store.found.values()} == {"done"}  # what was late is not kept
        assert len(store.found) == 2


def test_with_a_budget_and_without_smaller_runs_the_first_recipes_have_all_values(tmp_path: Path) -> None:
    space = {key: SPACE[key] for key in ("values", "derived", "require", "flags", "tokens", "memory")}
    _, pool = searched(tmp_path / "a", space=space)
    assert {run.argv[8] for run in pool.asked[:10]} == {"1"}  # what needs least memory is first
    found, pool = searched(tmp_path / "b", space=space, deadline=math.nextafter(math.inf, 0.0))
    for place, values in ((4, [1, 2, 4, 8]), (6, [1, 2, 4]), (8, [1, 2, 4])):
        assert {run.argv[place] for run in pool.asked[:4]} == {str(value) for value in values}
    assert len(pool.asked) == len(found.ranked) == len(found.candidates)


def test_a_budget_without_a_whole_simulation_gives_extended_ones(tmp_path: Path, monkeypatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    every, pool = searched(tmp_path / "a")
    first = next(index for index, run in enumerate(pool.asked) if run.steps == every.space.file.steps)
    clock = iter(range(10_000))
    found, _ = searched(tmp_path / "b", deadline=first - 0.5)
    assert not found.finished
    assert found.winner.status == "estimated"
    assert any("extended from smaller runs" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("usage: x\nx: error: unrecognized arguments: --tp\nforetrain: rank 0 left", "unrecognized arguments"),
        ("x.cpp:3: fatal error: pybind11.h: No such file\nERROR:megatron: Failed\nbarrier()", "ERROR:megatron"),
        ("╭─ Parsing error ───╮\n│ Unrecognized options: --tp │\n╰────╯\nforetrain: rank 0 left", "options: --tp"),
        ("loss 1\nloss 2\nforetrain: rank 0 left with exit status 2", "loss 2"),
        ("", ""),
    ],
)  # fmt: skip
def test_a_recipe_is_out_in_the_scripts_own_words(output: str, said: str) -> None:
    assert said in last_words(output)
    assert "foretrain" not in last_words(output)


def test_a_digest_knows_packages_modules_and_files_that_are_given(tmp_path: Path, monkeypatch) -> None:
    package = tmp_path / "titan"
    package.mkdir()
    (package / "train.py").write_text("one")
    (tmp_path / "run.py").write_text("import titan.train")
    (tmp_path / "setting.toml").write_text("a = 1")
    (tmp_path / "models").mkdir()
    (tmp_path / "models/own_configurations.py").write_text("layers = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "models")

    def digests() -> tuple[str, str]:
        given = [str(tmp_path / "setting.toml"), "--steps", "/", "own_configurations.small", "json", "pytest"]
        return digest_of(str(tmp_path / "run.py"), False, given), digest_of("titan.train", True, given)

    found = [digests()]
    for path, text in (
        (package / "train.py", "other"),
        (tmp_path / "setting.toml", "a = 2"),
        (tmp_path / "models/own_configurations.py", "layers = 2"),
    ):
        path.write_text(text)
        found.append(digests())
    assert len({each[0] for each in found}) == len({each[1] for each in found}) == 4
    assert found[-1] == digests()


def test_a_digest_knows_what_is_imported_from_anywhere_but_not_a_space(tmp_path: Path, monkeypatch) -> None:
    folders = [tmp_path / name for name in ("scripts", "elsewhere", "elsewhere/deep")]
    for folder in folders:
        folder.mkdir()
    script, space = folders[0] / "train.py", folders[0] / "space.py"
    for path, text in (
        (script, "def main():\n    import ft_own_model"), (space, "SPACE = {}"),
        (folders[1] / "ft_own_model.py", "import deep.layers"), (folders[2] / "__init__.py", ""),
        (folders[2] / "layers.py", "width = 1"),
    ):  # fmt: skip
        path.write_text(text)
    monkeypatch.setattr("sys.path", ["", str(folders[1]), *sys.path])

    def digest() -> str:
        return digest_of(str(script), False, [], apart=space)

    before = digest()
    assert digest_of(str(script), False, [str(space)], apart=space) != before  # an argument that is read counts
    space.write_text("SPACE = {'values': {}}")
    assert digest() == before
    (folders[2] / "layers.py").write_text("width = 2")
    assert digest() != before


def test_the_comparison_of_recipes_is_closer_than_each_forecast() -> None:
    one, other = account(512, 2, 2, 1), account(512, 2, 2, 2)
    compared = ratio(one, other, 0.1)
    apart = math.hypot(sigma(one) / one.time, sigma(other) / other.time, 0.05, 0.05)
    assert compared.error / compared.value < 2 * apart
    assert compared.error > ratio(one, other, 0.0).error
    assert ratio(one, one, 0.1).error == 0
    assert ratio(one, one, 0.1).value == 1
    for slower in (1.2, 1.5, 1.7, 2.1):  # whichever of two is compared with the other
        assert Ratio(slower, 0.5 * slower).open == Ratio(1 / slower, 0.5 / slower).open == (slower < math.exp(0.5))
    back = ratio(other, one, 0.1)
    assert back.error / back.value == pytest.approx(compared.error / compared.value)


def test_why_a_recipe_loses_names_what_it_has_more_of() -> None:
    pipeline, tensor, plain = account(64, 1, 4, 4), account(512, 8, 1, 4), account(512, 1, 1, 4)
    assert "exposed communication" in why_slower(tensor, plain)
    assert bound_by(plain).startswith("computation")
    assert "waiting for other ranks" in bound_by(pipeline)


def test_a_loser_is_compared_for_the_same_tokens() -> None:
    winner, loser = account(512, 1, 1, 4), account(256, 8, 1, 4)  # half the tokens
    assert loser.time < winner.time < 2 * loser.time
    assert why_slower(loser, winner) == ""
    text = why_slower(loser, winner, scale=2.0)
    assert text == f"{(2 * loser.exposed - winner.exposed) / winner.time:+.0%} exposed communication"


def test_a_front_holds_what_nothing_beats_in_both() -> None:
    assert front([(1, 5), (2, 3), (3, 4), (2, 2), (4, 1)]) == [0, 3, 4]


def test_a_recipes_interval_is_that_of_its_forecast():
    forecast = simulated_ranks().forecast
    account = _account(forecast, max(forecast.ranks, key=lambda rank: rank.mean("compute")), 0.0)
    assert interval(account, forecast.stack_range) == pytest.approx([time / 1e12 for time in forecast.interval])
