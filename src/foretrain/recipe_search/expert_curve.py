"""Cost of uneven loads of experts for the best recipes: whole simulations of them with other loads."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from foretrain.experiments.execution import Pool
from foretrain.experiments.result_store import ResultStore
from foretrain.live.imbalance import DRAWS, ImbalancePoint, drawn_loads
from foretrain.recipe_search.evaluation import RecipeRun, RunResult, RunSetting, clock_time, run
from foretrain.recipe_search.space import Recipe
from foretrain.recipe_search.strategy import Progress
from foretrain.units import SECOND

RECIPES = 2
"""Best recipes of a search that have a curve."""


@dataclass(frozen=True, slots=True)
class ExpertCurve:
    """Time of a recipe's step against the loads of experts.

    Attributes:
        recipe: which.
        points: by ascending spread of the loads; those that the budget did not allow are missing.
    """

    recipe: Recipe
    points: tuple[ImbalancePoint, ...]


def expert_curves(
    recipes: Sequence[Recipe],
    setting: RunSetting,
    steps: int,
    store: ResultStore[RunResult],
    pool: Pool,
    *,
    deadline: float = float("inf"),
    progress: Progress = lambda what, done, total: None,
    scratch: str | None = None,
) -> tuple[ExpertCurve, ...]:
    """Simulate ``recipes`` with the loads of a curve; none where the script has no routers whose choices are counted.

    Args:
        recipes: to simulate whole.
        setting: of the search.
        steps: that a simulation makes.
        store: of outcomes, entered; what it has is not simulated again.
        pool: workers.
        deadline: `time.monotonic` after which no simulation starts.
        progress: told about it.
        scratch: folder for the simulations' temporary files; None for the system's.
    """
    runs = {
        (recipe.number, draw): RecipeRun(
            replace(setting, experts=drawn_loads(*draw)), recipe.argv, steps, scratch, clock_time(deadline)
        )
        for draw in DRAWS
        for recipe in recipes
    }  # fmt: skip

    def simulated(wanted: Sequence[RecipeRun]) -> None:
        missing = {one.id: one for one in wanted if _is_missing(store.found.get(one.id))}
        done = len(wanted) - len(missing)

        def handed() -> Iterator[RecipeRun]:
            for one in missing.values():
                if time.monotonic() > deadline:
                    return
                yield one

        if missing:
            with pool.results(run, handed()) as results:
                for outcome in (one for one in results if one.status != "late"):
                    store.add([outcome])
                    done += 1
                    progress("loads of experts", done, len(wanted))

    firsts = [runs[recipe.number, DRAWS[0]] for recipe in recipes]
    simulated(firsts)
    known = [outcome for one in firsts if (outcome := store.found.get(one.id))]
    if known and all(outcome.account is not None and outcome.busiest_expert is None for outcome in known):
        return ()
    simulated([*runs.values()])
    return tuple(
        ExpertCurve(recipe, tuple(
            _point(*draw, outcome) for draw in DRAWS if (outcome := store.found.get(runs[recipe.number, draw].id))
        ))
        for recipe in recipes
    )  # fmt: skip


def _is_missing(outcome: RunResult | None) -> bool:
    """Return whether a run is to be made: what was missing for one that failed may be there now."""
    return outcome is None or outcome.status == "invalid"


def _point(sigma: float, seed: int, outcome: RunResult) -> ImbalancePoint:
    if outcome.account is None:
        failure = "out of memory" if outcome.status == "memory" else outcome.reason
        return ImbalancePoint(sigma, seed, None, failure=failure)
    step = round(outcome.account.time * SECOND)
    return ImbalancePoint(sigma, seed, step, outcome.busiest_expert, outcome.busiest_rank)
