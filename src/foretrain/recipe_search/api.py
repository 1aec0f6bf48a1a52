"""``ft.search``: the recipes of a script on a cluster, ranked."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from foretrain.device import preset
from foretrain.device.gpu import stack_factor
from foretrain.errors import ConfigError, unknown
from foretrain.experiments.execution import Backend, check_workers, workers
from foretrain.experiments.result_store import ResultStore
from foretrain.launch import check_no_interpreter, launched
from foretrain.live.device import native_build
from foretrain.live.device.settings import ExpertLoads
from foretrain.network.deployment import Deployment
from foretrain.network.deployment_notation import equipped, with_faults
from foretrain.recipe_search import evaluation
from foretrain.recipe_search.bill import Bill, Failures, bill_of, switch_power
from foretrain.recipe_search.evaluation import Account, RunResult, RunSetting, digest_of
from foretrain.recipe_search.expert_curve import RECIPES, ExpertCurve, expert_curves
from foretrain.recipe_search.space import Names, Recipe, declared, expand
from foretrain.recipe_search.strategy import Objective, Progress, RecipeState, Search, SearchFindings

Goal: TypeAlias = Literal["step", "cost", "energy", "goodput"]
"""Quantity to minimise."""
_PRICE = "give what a GPU costs an hour, e.g. --price 2.5; in Python, price=2.5"
_FAILURES = "say what fails, e.g. failures=ft.Failures(mtbf=9000, checkpoint=30, restart=300), in seconds"


@dataclass(frozen=True, repr=False)
class SearchResult:
    """Recipes of a script on a cluster, ranked.

    Attributes:
        found: what the search did, candidate by candidate.
        cluster: as given.
        world: GPUs.
        compared: the user's own recipe, if asked for.
        bill: money, energy and failures.
        goal: what was minimised.
        experts: loads of experts with which recipes were simulated, as given.
        curves: of the best recipes, what other loads of experts take; empty where nobody asked, or without routers.
        device: of the cluster's GPUs, as given; None where the cluster says it.
        faults: of links and GPUs, as given.
        factor: of the framework's efficiency, or its name, as given.
        module: whether the script is the name of a module.
    """

    found: SearchFindings
    cluster: str
    world: int
    compared: RecipeState | None = None
    bill: Bill | None = None
    goal: Goal = "step"
    experts: str = "balanced"
    curves: tuple[ExpertCurve, ...] = ()
    device: str | None = None
    faults: tuple[str, ...] = ()
    factor: str = "1"
    module: bool = False

    @property
    def best(self) -> Recipe:
        """Return the best recipe."""
        return self.found.winner.recipe

    @property
    def command(self) -> tuple[str, ...]:
        """Return the script, or ``-m`` and the module, with the arguments of the best recipe."""
        return self.command_of(self.best)

    def command_of(self, recipe: Recipe) -> tuple[str, ...]:
        """Return the script, or ``-m`` and the module, with the arguments of ``recipe``."""
        return ("-m", *recipe.argv) if self.module else recipe.argv

    def __repr__(self) -> str:
        candidates = len(self.found.candidates)
        return f"<SearchResult of {candidates} recipes on {self.cluster}: best {self.best}>"


def step_time(account: Account, recipe: Recipe) -> float:
    """Return the seconds of a step; of a token where the space says how many a step has."""
    return account.time / recipe.work


def search(
    script: str | Sequence[str | float | PathLike[str]],
    space: str | Path | Mapping[str, Any],
    cluster: str,
    *,
    module: bool = False,
    device: str | None = None,
    factor: str | float = 1.0,
    faults: str | Sequence[str] = (),
    experts: str = "balanced",
    experts_curve: bool = False,
    store: str | Path | None = None,
    budget: float | None = None,
    goal: Goal = "step",
    price: float | None = None,
    failures: Failures | None = None,
    checkpoint_every: float | Literal["auto"] | None = None,
    run_tokens: float | None = None,
    compare_with: str | Names | None = None,
    exhaustive: bool = False,
    jobs: int | None = None,
    backend: Backend = "processes",
    address: str | None = None,
    progress: Progress = lambda what, done, total: None,
) -> SearchResult:
    """Find the recipe of ``script`` that takes least on ``cluster``.

    Args:
        script: the script and its arguments, with ``{name}`` for values of the space.
        space: a file, a preset's name, or a dictionary; see `foretrain.recipe_search.space`.
        cluster: as of ``foretrain simulate``.
        module: the script is a module's name.
        device: the cluster's GPUs, or a file of their measurements.
        factor: of the framework's efficiency, or its name.
        faults: of links and GPUs, one or several; see `foretrain.network.deployment_notation.with_faults`.
        experts: loads of experts; see `foretrain.live.simulate.simulate`.
        experts_curve: simulate the two best recipes also with other loads, ten more times each.
        store: folder that keeps outcomes, so that an interrupted search goes on; None keeps none.
        budget: seconds after which no simulation starts.
        goal: what to minimise for a token, or a step where the space does not say how many tokens it has: time (of
            steps alone), time with failures (goodput), money (cost) or energy.
        price: of a GPU's hour; None takes a list price, with its date, where one is known.
        failures: of the whole job; None knows none.
        checkpoint_every: seconds of work between checkpoints; None and ``"auto"`` take the best.
        run_tokens: of the whole run, to tell what that takes.
        compare_with: a recipe to simulate whole first, e.g. ``"tp=8,pp=2"`` or ``{"tp": 8, "pp": 2}``; where several
            fit, the best of them.
        exhaustive: simulate every recipe whole.
        jobs: workers on this machine; as many as it has cores where None.
        backend: what simulates.
        address: of a running Dask or Ray cluster.
        progress: told what is under way, how many simulations are done and how many there will be.

    Raises:
        ConfigError: an argument or the space is wrong, or no recipe meets its conditions.
        NoRecipe: no recipe works; says what kills most.
    """
    words = _texts(script, "script", "write the script and its arguments, e.g. ['train.py', '--tp', '{tp}']")
    if not words:
        raise ConfigError("script", script, "is empty", "name a script and its arguments")
    if goal not in get_args(Goal):
        raise unknown("goal", goal, get_args(Goal))
    faults = tuple(_texts(faults, "faults", "write e.g. 'link:leaf3-spine1=10%', or several"))
    if not isinstance(store, str | PathLike | None):
        raise ConfigError("store", store, "is no folder", "write its path, or None to keep nothing")
    if launcher := launched(["-m", *words] if module else words):
        raise launcher.refusal("script", "search")
    check_no_interpreter(words[0])
    if not module and not Path(words[0]).is_file():
        raise ConfigError("script", words[0], "is no file", f"there is none at {Path(words[0]).absolute()}")
    if budget is not None and not (isinstance(budget, int | float) and budget > 0):
        raise ConfigError("budget", budget, "is no time", "write e.g. 10min; in Python, seconds")
    check_workers(jobs, backend, address)
    if not isinstance(failures, Failures | None):
        raise ConfigError("failures", failures, "is no Failures", _FAILURES)
    if failures is None and checkpoint_every is not None:
        raise ConfigError("checkpoint_every", checkpoint_every, "does nothing where nothing fails", _FAILURES)
    sound = equipped(cluster, device)[0]
    where = with_faults(sound, faults)
    assert where.device is not None
    stack_factor(preset(where.device), factor)  # raises where there is none, before anything starts
    gpus = _gpus_per_server(where)
    file = declared(space)
    if run_tokens is not None and file.tokens is None:
        remedy = 'write it into the space, e.g. tokens = "global_batch * sequence"'
        raise ConfigError("run_tokens", run_tokens, "needs the tokens of a step, which the space does not say", remedy)
    recipes = expand(file, words, where.total_gpus, gpus)
    own = () if compare_with is None else recipes.find(_checked_recipe(compare_with))
    native_build.built()
    every = None if checkpoint_every == "auto" else checkpoint_every
    bill = bill_of(where.device, where.total_gpus, price, failures, every, run_tokens, gpus, switch_power(sound))
    objective = _objective(goal, bill)
    loads = ExpertLoads.parse(experts)
    given = {
        part
        for recipe in (*recipes.recipes, *own)
        for word in recipe.argv[1:]
        for part in (word, word.partition("=")[2])
    }
    apart = Path(space) if isinstance(space, str | PathLike) else None
    digest = digest_of(words[0], module, {*given, cluster, device or ""} - {""}, apart)
    digest += repr(loads.rows) if loads is not None and loads.rows else ""
    setting = RunSetting(cluster, module, str(factor), device, digest, faults, experts)
    deadline = float("inf") if budget is None else time.monotonic() + budget
    with ExitStack() as stack:
        # A worker that is killed in the middle of a simulation leaves its files to this process.
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="foretrain-", ignore_cleanup_errors=True))
        folder = store or Path(scratch, "store")
        kept = stack.enter_context(ResultStore(Path(folder), RunResult))
        stack.callback(evaluation.close)
        pool = stack.enter_context(workers(jobs, backend, address))
        made = Search(
            recipes, setting, objective, kept, pool, exhaustive=exhaustive, also=own,
            deadline=deadline, progress=progress, scratch=scratch,
        )  # fmt: skip
        found = made.run()
        curves = () if not experts_curve else expert_curves(
            [one.recipe for one in found.ranked[:RECIPES]], setting, recipes.file.steps, kept, pool, deadline=deadline,
            progress=progress, scratch=scratch,
        )  # fmt: skip
    compared = _compared(found, own)
    if compared is not None and len(own) > 1:
        said = f"{compare_with} fits {len(own)} recipes; the best of them is compared as yours"
        found = replace(found, warnings=(*found.warnings, said))
    return SearchResult(
        found, cluster, where.total_gpus, compared, bill, goal, experts, curves, device, faults, str(factor), module
    )  # fmt: skip


def _texts(given: object, field: str, remedy: str) -> list[str]:
    """Return one text, or several, as a list; paths and numbers are written as texts. Raises ConfigError."""
    one = str | int | float | PathLike
    every = [given] if isinstance(given, str | PathLike) else given
    if not (isinstance(every, Sequence) and all(isinstance(each, one) for each in every)):
        raise ConfigError(field, given, "is neither a text nor several", remedy)
    return [str(each) for each in every]


def _checked_recipe(recipe: str | Names) -> str | Names:
    """Return the recipe. Raises ConfigError where it is none."""
    values = recipe.values() if isinstance(recipe, Mapping) else [recipe] if isinstance(recipe, str) else [None]
    if not all(isinstance(one, bool | int | float | str) for one in values):
        raise ConfigError("compare_with", recipe, "is no recipe", "write e.g. tp=8,pp=2")
    return recipe


def _compared(found: SearchFindings, own: Sequence[Recipe]) -> RecipeState | None:
    """Return the best of the user's own recipes, as far as is known; one that failed where none works."""
    states = [found.candidates[recipe.number] for recipe in own]
    known = [
        (found.objective(one.account, one.recipe), one)
        for one in states
        if one.account is not None and one.status not in ("memory", "invalid")
    ]
    return min(known, key=lambda each: each[0])[1] if known else next(iter(states), None)


def _objective(goal: Goal, bill: Bill) -> Objective:
    """Return what to minimise. Raises ConfigError where it is not known of these GPUs."""
    if goal == "step":
        return step_time
    if goal == "goodput":
        if bill.failures is None:
            raise ConfigError("goal", goal, "needs to know how often the job fails", "give the failures: --mtbf 50000h")
        return lambda account, recipe: step_time(account, recipe) / bill.useful(account)
    if goal == "cost" and bill.price is None:
        raise ConfigError("goal", goal, f"needs a price, and no list price of {bill.device} is known", _PRICE)
    if goal == "energy" and bill.watts is None:
        raise ConfigError("goal", goal, f"needs the power of {bill.device}, which is not known", "take another goal")
    counted = bill.money if goal == "cost" else bill.joules
    return lambda account, recipe: (counted(account) or 0.0) / recipe.work


def _gpus_per_server(where: Deployment) -> int:
    """Return the job's GPUs on the server of its first rank."""
    nodes, ranks = where.topology.nodes, where.topology.ranks
    first = nodes[ranks[where.members[0]]].server
    return sum(nodes[ranks[rank]].server == first for rank in where.members)
