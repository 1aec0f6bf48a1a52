"""Search for the best recipe: short simulations of large ones, whole ones of those that may be the best.

# Note [Short runs]
A step repeats the same work: for each micro-batch, and for each layer. What a step takes, needs in memory and launches
is then linear in the number of either, once the pipeline is full, and bilinear in both. So a recipe is run at two sizes
of each, and extended: with sizes l and h, the size f has (h - f)/(h - l) of the one and (f - l)/(h - l) of the other.
How far this is off is seen where a recipe is also run whole, and every recipe is that could be the best within twice
the largest such error. The winner is always run whole. A recipe without smaller runs is run whole at once: starting a
run that is not much smaller costs more than it saves.

# Note [Sure bounds]
A recipe is left alone as soon as something shows that it cannot be the best. The runs with the fewest micro-batches
are made first, and a part takes no longer than the whole. Products, attention, and a layer's normalisation, dropout and
activation are launched for each micro-batch, those of an optimizer's step aside, so that the whole takes at least their
time there times as many micro-batches, whatever is hidden behind them ("compute alone"); and the busiest link's bytes
at its full rate ("bytes alone"). Where smaller runs are smaller in more than micro-batches, e.g. in layers, both are
extended to the whole as all else is; a recipe is then left alone only where it is above the best by more than extended
forecasts may be off. What has too little memory has so with more of what needs it: recipes that differ only by that are
not run.

# Note [Extended memory]
Neither the peak of tensors nor what the allocator reserves is linear in a few layers: a second layer has buffers that a
third shares with it, and a cache grows by whole blocks. Either may come out much too large, seldom both, so the smaller
of the two counts; a recipe is out where that is clearly more than there is, already by its runs with the fewest
micro-batches.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Literal

import msgspec

from foretrain.errors import ForetrainError
from foretrain.experiments.execution import Pool
from foretrain.experiments.result_store import ResultStore
from foretrain.recipe_search.evaluation import Account, RecipeRun, RunResult, RunSetting, clock_time, run
from foretrain.recipe_search.space import Recipe, RecipeSpace, ShortRun, Value, listed, value_text

Status = Literal["open", "estimated", "whole", "invalid", "memory", "beaten"]
Objective = Callable[[Account, Recipe], float]
"""Quantity to minimise, of a recipe's step."""
Progress = Callable[[str, int, int], None]
"""Called with what is under way, the simulations made, and how many there will be as far as is known; without those
that the store had."""

_SHORT_STEPS = 2
"""Steps of a short run: the first allocates and makes the optimizer's state, the second is like all others."""
_FIRST_ERROR = 0.05
"""Relative error of an extended forecast until one has been seen."""
_LEAST_ERROR = 0.005
_MEMORY_MARGIN = 1.05
"""Extended memory over what there is from which on a whole run is not tried; see Note [Extended memory]."""
_SHOWN = 3
"""Recipes to run whole at least."""
_SAME_WORK = 1.5
"""Ratio of the arithmetic of two recipes' steps up to which both may have one batch: recomputation may be in it."""
_SAME_FAILURE = 6
"""Recipes that must fail in the same words, numbers apart, to look whether those with other values fail as well."""
_LARGEST_PART = re.compile(r"Of them were allocated \S+ \S+ for ([a-z]+)")
"""Purpose of most memory, in the words of `foretrain.live.rank_processes.OutOfMemory`."""


class NoRecipe(ForetrainError):
    """No recipe of a space works; says what kills most."""


@dataclass
class RecipeState:
    """Knowledge of one recipe.

    Attributes:
        recipe: which.
        shorts: its smaller runs.
        status: open, not simulated yet; estimated, extended from smaller runs; whole; or why it is out.
        reason: why it is out.
        account: of a step, the best that is known; None where it is not known.
        outcome: of the whole run, or of the one that failed.
        pieces: outcomes of the smaller runs, in their order.
        bound: of the objective, which no more simulation can undercut.
        bound_by: what the bound is made of.
    """

    recipe: Recipe
    shorts: tuple[ShortRun, ...]
    status: Status = "open"
    reason: str = ""
    account: Account | None = None
    outcome: RunResult | None = None
    pieces: dict[int, RunResult] = field(default_factory=dict)
    bound: float = 0.0
    bound_by: str = ""

    @property
    def firsts(self) -> int:
        """Return how many of the smaller runs have the fewest micro-batches; 0 where there are none."""
        return sum(short.fewest for short in self.shorts)

    @property
    def out(self) -> bool:
        """Return whether nothing more is to be simulated of it."""
        return self.status in ("whole", "invalid", "memory", "beaten")


@dataclass(frozen=True, slots=True)
class SearchFindings:
    """Outcome of a search.

    Attributes:
        space: that was searched.
        candidates: all, in the space's order; behind them the user's own that the space does not list.
        ranked: those with a whole run, best first; extended ones where the budget allowed none.
        error: largest relative error of an extended forecast that was seen.
        runs: simulations made, or taken from the store.
        cpu: seconds that all simulations computed.
        warnings: what the user should know.
        finished: whether the budget was enough.
        objective: what was minimised.
    """

    space: RecipeSpace
    candidates: tuple[RecipeState, ...]
    ranked: tuple[RecipeState, ...]
    error: float
    runs: int
    cpu: float
    warnings: tuple[str, ...]
    finished: bool
    objective: Objective

    @property
    def winner(self) -> RecipeState:
        """Return the best recipe."""
        return self.ranked[0]


class Search:
    """Search of one space.

    Args:
        space: recipes.
        setting: of all simulations.
        objective: to minimise.
        store: of outcomes, entered.
        pool: workers.
        exhaustive: run every recipe whole.
        also: the user's own recipe, which is run whole and first; of several, the best of them.
        deadline: `time.monotonic` after which no simulation starts, but for the first of the user's own recipe.
        progress: told about it.
        scratch: folder for the simulations' temporary files; None for the system's.
    """

    def __init__(
        self,
        space: RecipeSpace,
        setting: RunSetting,
        objective: Objective,
        store: ResultStore[RunResult],
        pool: Pool,
        *,
        exhaustive: bool = False,
        also: Sequence[Recipe] = (),
        deadline: float = float("inf"),
        progress: Progress = lambda what, done, total: None,
        scratch: str | None = None,
    ) -> None:
        self._space, self._setting, self._objective = space, setting, objective
        self._store, self._pool, self._exhaustive = store, pool, exhaustive
        self._also = {recipe.number for recipe in also}
        self._deadline, self._progress, self._scratch = deadline, progress, scratch
        unlisted = [recipe for recipe in also if recipe.number >= len(space.recipes)]
        self.candidates = tuple(RecipeState(recipe, space.short_runs(recipe)) for recipe in (*space.recipes, *unlisted))
        self._spread = deadline < float("inf") and not any(one.shorts for one in self.candidates)
        self._handed_out: Counter[tuple[str, Value]] = Counter()  # values of names, by how often they were simulated
        self._errors: list[float] = []
        self._runs, self._made, self._cpu, self._late = 0, 0, 0.0, False

    def run(self) -> SearchFindings:
        """Search until no recipe is left that could be the best. Raises NoRecipe where none works."""
        self._compare()
        everything = [one for one in sorted(self.candidates, key=self._need) if not one.out]
        if self._exhaustive:
            self._whole(everything)
        else:
            self._whole([one for one in everything if not one.shorts])
            self._short(everything, first=True)
            promising = [one for one in self._going() if one.status == "open"]
            self._short(promising[: 2 * self._pool.count], first=False)
            self._refine(self._pool.count)
            self._short(self._going(), first=False)
            self._refine(_SHOWN)
        return self._found()

    def _compare(self) -> None:
        """Run the user's own recipe whole; of several those without smaller runs, and the best of the others."""
        own = [one for one in self.candidates if one.recipe.number in self._also]
        if not own:
            return
        self._whole([one for one in own if len(own) == 1 or not one.shorts])
        if len(own) > 1:
            self._short(own, first=True)
            self._short(own, first=False)
        while not self._late and (ready := [one for one in own if one.status == "estimated"]):
            best = min(ready, key=self._value)
            if self._value(best) >= self._best():
                return
            self._whole([best])

    def _going(self) -> list[RecipeState]:
        """Return the candidates that are not out, least bound first; mark those that the best beats for sure."""
        best = self._best()
        extended = {*self._space.file.short} - {self._space.file.batch}
        limit = best * (1 + self._error()) if extended else best
        for one in self.candidates:
            if not one.out and one.bound > limit:
                one.status = "beaten"
                one.reason = f"at least {one.bound / best:.2f} times the best, by {one.bound_by}"
        return sorted((one for one in self.candidates if not one.out), key=lambda one: one.bound)

    def _best(self) -> float:
        return min((self._value(one) for one in self.candidates if one.status == "whole"), default=float("inf"))

    def _value(self, candidate: RecipeState) -> float:
        assert candidate.account is not None
        return self._objective(candidate.account, candidate.recipe)

    def _need(self, candidate: RecipeState) -> tuple[object, ...]:
        """Return a key that sorts what needs least memory first, so that what fails tells of others."""
        rule, values = self._space.file.memory, candidate.recipe.values
        orders = [_order(self._space, name, values[name]) for name in rule.grows if name in values]
        orders += [-_order(self._space, name, values[name]) for name in rule.shrinks if name in values]
        return sum(order for order in orders if not math.isnan(order)), candidate.recipe.number

    # Waves of simulations

    def _short(self, candidates: Iterable[RecipeState], *, first: bool) -> None:
        """Make the first smaller runs of candidates, or all others."""
        work: list[tuple[RecipeState, int]] = []
        for one in candidates:
            pieces = one.firsts if first else len(one.shorts)
            work += [(one, piece) for piece in range(pieces) if piece not in one.pieces]
        self._wave("short simulations", work)

    def _refine(self, least: int) -> None:
        """Run whole what may be the best, best first, until nothing else may be; ``least`` at any rate."""
        while True:
            ready = self._ranked("estimated")
            whole = sum(one.status == "whole" for one in self.candidates)
            limit = self._best() * (1 + self._error())
            chosen = [one for one in ready if self._value(one) <= limit][: self._pool.count]
            chosen = chosen or ready[: max(least - whole, 0)]
            if not chosen or self._late:
                return
            self._whole(chosen)

    def _whole(self, candidates: Iterable[RecipeState]) -> None:
        self._wave("whole simulations", [(one, -1) for one in candidates])

    def _wave(self, what: str, work: Sequence[tuple[RecipeState, int]]) -> None:
        """Simulate the pieces of candidates in ``work``, -1 being the whole, but for those that prove needless."""
        asked: dict[str, list[tuple[RecipeState, int]]] = {}
        runs: dict[str, RecipeRun] = {}
        for candidate, piece in work:
            made = self._run_of(candidate, piece)
            runs[made.id] = made
            asked.setdefault(made.id, []).append((candidate, piece))
        for name in [*runs]:
            kept = self._store.found.get(name)
            if kept is not None and kept.status != "invalid":  # what was missing then may be there now
                self._learn(kept, asked[name])
                del runs[name]
        if not runs:
            return
        total = self._made + len(runs)
        self._progress(what, self._made, total)
        with self._pool.results(run, self._handed(runs, asked)) as results:
            for outcome in results:
                if outcome.status == "late":
                    self._late = True
                    continue
                self._made += 1
                self._store.add([outcome])
                self._learn(outcome, asked[outcome.id])
                self._progress(self._says(what), self._made, total)
                self._check_failures()

    def _handed(
        self, runs: Mapping[str, RecipeRun], asked: Mapping[str, list[tuple[RecipeState, int]]]
    ) -> Iterator[RecipeRun]:
        """Yield runs as workers are free, but for those that what has been learnt makes needless."""
        left, until = dict(runs), clock_time(self._deadline)
        while left:
            first = bool(self._also and not self._handed_out)
            if time.monotonic() > self._deadline and not first:
                self._late = True
                return
            name = next(iter(left))
            # Whether other recipes work is seen soonest by those that differ most, and so is what is fast: in the order
            # of least memory, a budget may end before anything but the slowest was tried.
            if self._spread or self._alike_failures():
                name = min(left, key=lambda each: self._repeats(asked[each][0][0]))
            made = left.pop(name)
            wanted = [candidate for candidate, _ in asked[name] if not self._needless(candidate)]
            if wanted:
                self._handed_out.update(wanted[0].recipe.values.items())
                yield made if first else replace(made, until=until)

    def _repeats(self, candidate: RecipeState) -> tuple[int, int]:
        """Return a key that is least for a recipe with most values that were not simulated yet, else the rarest."""
        counts = [self._handed_out[value] for value in candidate.recipe.values.items()]
        return -counts.count(0), sum(counts)

    def _run_of(self, candidate: RecipeState, piece: int) -> RecipeRun:
        steps = self._space.file.steps
        if piece < 0:
            return RecipeRun(self._setting, candidate.recipe.argv, steps, self._scratch)
        return RecipeRun(self._setting, candidate.shorts[piece].argv, min(_SHORT_STEPS, steps), self._scratch)

    def _needless(self, candidate: RecipeState) -> bool:
        if candidate.out:
            return True
        if candidate.recipe.number >= len(self._space.recipes):
            return False  # the space does not say what it needs
        for other in self.candidates:
            simulated = other.outcome is not None or other.pieces  # and not only inferred from a neighbour itself
            listed = other.recipe.number < len(self._space.recipes)
            if listed and other.status == "memory" and simulated and self._needs_more(candidate, other):
                candidate.status = "memory"
                candidate.reason = f"needs more than {other.recipe}, which has too little memory"
                return True
        return False

    def _needs_more(self, candidate: RecipeState, other: RecipeState) -> bool:
        """Return whether ``candidate`` needs at least the memory of ``other``, by what the space says."""
        rule = self._space.file.memory
        for name in self._space.varying:
            values = candidate.recipe.values[name], other.recipe.values[name]
            mine, theirs = (_order(self._space, name, value) for value in values)
            more = mine >= theirs if name in rule.grows else mine <= theirs if name in rule.shrinks else False
            if not more and values[0] != values[1]:
                return False
        return True

    # What is learnt

    def _learn(self, outcome: RunResult, of: Iterable[tuple[RecipeState, int]]) -> None:
        self._runs += 1
        self._cpu += outcome.cpu
        for candidate, piece in of:
            if outcome.account is None:
                candidate.status = "memory" if outcome.status == "memory" else "invalid"
                candidate.reason, candidate.outcome, candidate.account = outcome.reason, outcome, None
            elif piece < 0:
                if candidate.account is not None:
                    self._errors.append(abs(outcome.account.time / candidate.account.time - 1))
                candidate.status, candidate.account, candidate.outcome = "whole", outcome.account, outcome
            else:
                candidate.pieces[piece] = outcome
                self._estimate(candidate)

    def _estimate(self, candidate: RecipeState) -> None:
        """Extend what the smaller runs of a candidate tell; see Note [Short runs] and Note [Sure bounds]."""
        if candidate.out or not all(piece in candidate.pieces for piece in range(candidate.firsts)):
            return
        if candidate.firsts < len(candidate.shorts):
            least, candidate.bound_by = self._least(candidate)
            candidate.bound = self._objective(least, candidate.recipe)
            self._check_memory(candidate, least)
        if len(candidate.pieces) < len(candidate.shorts) or candidate.out:
            return
        accounts = [piece.account for _, piece in sorted(candidate.pieces.items())]
        extended = combined([one for one in accounts if one], [short.weight for short in candidate.shorts])
        candidate.account = msgspec.structs.replace(extended, reserved=min(extended.reserved, extended.allocated))
        candidate.status = "estimated"
        self._check_memory(candidate, extended)

    def _check_memory(self, candidate: RecipeState, extended: Account) -> None:
        """Mark a candidate that needs clearly more memory than a GPU has; see Note [Extended memory]."""
        need, usable = min(extended.reserved, extended.allocated), candidate.pieces[0].usable
        if need > _MEMORY_MARGIN * usable:
            candidate.status = "memory"
            candidate.reason = f"needs {need / 2**30:.1f} of {usable / 2**30:.1f} GiB, extended from smaller runs"

    def _least(self, candidate: RecipeState) -> tuple[Account, str]:
        """Return an account of the least that the whole can take, of runs with the fewest micro-batches.

        Also return what its time is made of.
        """
        pieces = range(candidate.firsts)
        accounts = [found for piece in pieces if (found := candidate.pieces[piece].account)]
        weights = [candidate.shorts[piece].weight for piece in pieces]
        weights = [weight / sum(weights) for weight in weights]
        account = combined(accounts, weights)
        times = {
            "its run with the fewest micro-batches": account.time,
            "the computation of its micro-batches alone": account.repeated * self._space.batches(candidate.recipe),
            "the bytes of its busiest link alone": account.carried,
        }
        what = max(times, key=lambda name: times[name])
        return msgspec.structs.replace(account, time=times[what]), what

    def _error(self) -> float:
        return max(_LEAST_ERROR, 2 * max(self._errors)) if self._errors else _FIRST_ERROR

    def _says(self, what: str) -> str:
        ranked = self._ranked()
        return f"{what}; best {ranked[0].recipe}" if ranked else what

    def _ranked(self, status: Status = "whole") -> list[RecipeState]:
        return sorted((one for one in self.candidates if one.status == status), key=self._value)

    def _alike_failures(self) -> list[RecipeState]:
        """Return the recipes that failed, where they are several, in the same words, and nothing else was found."""
        failed = [one for one in self.candidates if one.status == "invalid"]
        others = any(one.pieces or one.status in ("memory", "whole") for one in self.candidates)
        if len(failed) < min(_SAME_FAILURE, len(self.candidates)) or others:
            return []
        return failed if len({_without_values(one) for one in failed}) == 1 else []

    def _check_failures(self) -> None:
        """Raise NoRecipe where all that was simulated failed in the same words, every value of a name among it."""
        failed = self._alike_failures()
        untried = {value for one in self.candidates for value in one.recipe.values.items()}
        untried -= {value for one in failed for value in one.recipe.values.items()}
        if failed and not untried:
            names = f", with every value of {', '.join(self._space.varying)}," if self._space.varying else ""
            if len(failed) == 1:
                raise NoRecipe(f"the only recipe fails: {failed[0].reason}")
            raise NoRecipe(f"{len(failed)} recipes{names} fail in the same words: {failed[0].reason}")

    def _found(self) -> SearchFindings:
        ranked = self._ranked() or self._ranked("estimated")
        if not ranked:
            raise NoRecipe(self._why_none())
        return SearchFindings(
            self._space,
            self.candidates,
            tuple(ranked),
            max(self._errors, default=0.0),
            self._runs,
            self._cpu,
            (*self._ignored(), *self._warned(), *self._hasty(ranked[0]), *self._unlike_work()),
            not self._late,
            self._objective,
        )

    def _why_none(self) -> str:
        if self._late:
            return (
                f"the budget was over after {self._runs} simulations, before a recipe was simulated whole; allow more"
            )
        counts = {kind: [one for one in self.candidates if one.status == kind] for kind in ("memory", "invalid")}
        kind = max(counts, key=lambda kind: len(counts[kind]))
        example = counts[kind][0]
        what = "run out of GPU memory" if kind == "memory" else "fail in the script"
        largest = Counter(found[1] for one in counts["memory"] if (found := _LARGEST_PART.search(one.reason)))
        parts = ", ".join(f"{name} in {count}" for name, count in largest.most_common())
        told = f". The largest part of the memory, as far as it is known: {parts}" if parts else ""
        return (
            f"none of {len(self.candidates)} recipes works: {len(counts['memory'])} run out of memory and "
            f"{len(counts['invalid'])} fail in the script. Most {what}, e.g. {example.recipe}: {example.reason}{told}"
        )

    def _hasty(self, winner: RecipeState) -> Iterator[str]:
        """Yield a warning if the winner was not simulated whole."""
        if winner.status == "estimated":
            yield "the budget was over before a recipe was simulated whole: all are extended from smaller runs"

    def _warned(self) -> Iterator[str]:
        """Yield what whole simulations warned of, and which kernels' times are guesses, with how many it concerns."""
        whole = [one.outcome for one in self.candidates if one.status == "whole" and one.outcome is not None]
        for warning, count in Counter(text for one in whole for text in one.warnings).items():
            yield f"{warning} (in {count} of {len(whole)} whole simulations)"
        if names := sorted({name for one in whole for name in one.unknown}):
            yield (
                f"charged for their bytes, or the arithmetic they are known to take: {', '.join(names)}; "
                "foretrain calibrate measures them"
            )

    def _unlike_work(self) -> Iterator[str]:
        """Yield a warning if steps differ in their arithmetic, and the space does not say how many tokens they have."""
        known = [one.account.flops for one in self.candidates if one.account and one.recipe.tokens is None]
        least, most = min(known, default=0.0), max(known, default=0.0)
        if most > _SAME_WORK * least > 0:
            yield (
                f"steps differ in their arithmetic, by up to {most / least:.2g} times: if they have different batches, "
                "say how many tokens a step has (tokens in the space), so that recipes are compared by the token"
            )

    def _ignored(self) -> Iterator[str]:
        """Yield a warning for each name of which values make no difference at all, as far as they were simulated."""
        for name in self._space.varying:
            alike: dict[tuple[Value, Value], bool] = {}  # of two values that were compared, whether always
            groups: dict[object, list[RecipeState]] = {}
            for one in self.candidates:
                if one.account is not None:
                    others = tuple(value for key, value in one.recipe.values.items() if key != name)
                    groups.setdefault((others, one.status), []).append(one)
            for one, other in (pair for group in groups.values() for pair in combinations(group, 2)):
                pair = one.recipe.values[name], other.recipe.values[name]
                alike[pair] = alike.get(pair, True) and one.account == other.account
            compared = dict.fromkeys(value for pair in alike for value in pair)
            for same in _classes(compared, alike):
                values = [str(value) or "none" for value in same]
                if len(same) == len(compared):
                    yield (
                        f"{name} makes no difference: its values {', '.join(values)} gave identical simulations; "
                        "is it ignored?"
                    )
                else:
                    yield f"{name}: {' and '.join(values)} gave identical simulations; does the script tell them apart?"


def _without_values(failed: RecipeState) -> str:
    """Return why a recipe failed without numbers and its own values, which the script may repeat."""
    texts = sorted(filter(None, map(value_text, failed.recipe.values.values())), key=len, reverse=True)
    return re.sub("|".join([*(rf"(?<!\w){re.escape(text)}(?!\w)" for text in texts), r"\d+"]), "", failed.reason)


def _classes(values: Iterable[Value], alike: Mapping[tuple[Value, Value], bool]) -> list[list[Value]]:
    """Return groups of several values of which each is alike to one before it, and different from none."""
    found: list[list[Value]] = []
    for value in values:
        for group in found:
            known = [alike[pair] for one in group for pair in ((one, value), (value, one)) if pair in alike]
            if known and all(known):
                group.append(value)
                break
        else:
            found.append([value])
    return [group for group in found if len(group) > 1]


def _order(space: RecipeSpace, name: str, value: Value) -> float:
    """Return a number that orders a name's values: themselves where all are numbers, else their place in the list.

    It is nan where the list does not say, and compares with none.
    """
    values = listed(space.file.values[name])
    if all(isinstance(each, int | float) for each in (*values, value)):
        return float(value)
    return float(values.index(value)) if value in values else math.nan


def combined(accounts: Sequence[Account], weights: Sequence[float]) -> Account:
    """Return the sum of ``accounts`` times ``weights``."""

    def sum_of(values: Iterable[float]) -> float:
        return sum(value * weight for value, weight in zip(values, weights, strict=True))

    names = dict.fromkeys(name for one in accounts for name in one.kernels)
    numbers = {
        key: max(sum_of(getattr(one, key) for one in accounts), 0.0)
        for key in Account.__struct_fields__
        if key != "kernels"
    }
    kernels = {name: max(sum_of(one.kernels.get(name, 0.0) for one in accounts), 0.0) for name in names}
    return Account(kernels=kernels, **numbers)
