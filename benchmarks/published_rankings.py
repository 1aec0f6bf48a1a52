"""Published runs that differ in their recipe alone: how forecasts rank them, and whether intervals of comparisons hold.

Runs are those of accuracy/groundtruth-train.csv, with the forecasts that accuracy.py has kept.

    python benchmarks/published_rankings.py                    prints the rankings, as search.py does
    python benchmarks/published_rankings.py --simulate FOLDER  simulates the runs first, and keeps what intervals of
                                                               comparisons depend on in data/rankings.json; goes on from
                                                               what FOLDER has
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
from measure import machine
from scipy.stats import spearmanr

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "accuracy"))

from row_outcome import STEPS, device_of, stack_of  # noqa: E402, its folder is no package
from rows import COMPUTED, Row, read  # noqa: E402
from trust import SERVER  # noqa: E402

from foretrain.cli.progress import searching  # noqa: E402
from foretrain.device import forecast_range, preset  # noqa: E402
from foretrain.experiments.execution import workers  # noqa: E402
from foretrain.experiments.result_store import ResultStore  # noqa: E402
from foretrain.recipe_search.comparison import ratio  # noqa: E402
from foretrain.recipe_search.evaluation import Account, RecipeRun, RunResult, RunSetting, run  # noqa: E402

FORECASTS = HERE / "data/accuracy.jsonl"
"""Forecasts of published runs, which benchmarks/accuracy.py has simulated."""
COMPARED = HERE / "data/rankings.json"
"""Accounts of a step of the runs of measured rankings."""
LEAST = 4
"""Runs that make a ranking."""
_YES = {True: "yes", False: "no "}


@dataclass(frozen=True)
class Ranking:
    """Published runs that differ in their recipe alone, and how forecasts rank them, by the time of a token.

    Attributes:
        name: of the model and the GPUs.
        computed: whether the runs were published as measured, but a model computed them.
        runs: how many there are.
        batches: how many batches there are among them; where it is more than one, recipes differ in that as well.
        top: whether the fastest as measured is among the first three as forecast.
        chance: how likely it is among three at random.
        first: measured time of the recipe that is forecast to be fastest, over that of the fastest as measured.
        three: the same of the best of the first three, for who measures these.
        rank: Spearman's.
        shared: of the variance of the errors' logarithms, what all have in common.
        pairs: of runs whose comparison's interval is known.
        inside: those whose measured ratio lies in it.
    """

    name: str
    computed: bool
    runs: int
    batches: int
    top: bool
    chance: float
    first: float
    three: float
    rank: float
    shared: float
    pairs: int
    inside: int


@dataclass(frozen=True)
class Published:
    """A published run, with its forecast; both in seconds for a token."""

    row: Row
    forecast: float
    measured: float


def groups() -> Iterator[tuple[str, list[Published]]]:
    """Yield the names and the runs of rankings, of runs whose forecasts benchmarks/accuracy.py has kept.

    A command that was measured more than once, as of several releases, is one run: that of the median time.
    """
    rows = {row.id: row for row in read()[0]}
    found: dict[tuple[str, ...], dict[str, list[Published]]] = defaultdict(lambda: defaultdict(list))
    for line in FORECASTS.read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        if one["failure"] or one["id"] not in rows:
            continue
        row = rows[one["id"]]
        sequence = row.argv[row.argv.index("--sequence") + 1]
        key = row.family, row.model, row.precision, f"{row.ranks} {row.gpu}", sequence
        measured = Published(row, one["predicted"] / row.tokens, one["measured"] / row.tokens)
        found[key][one["command"]].append(measured)
    for key, commands in sorted(found.items()):
        if len(commands) >= LEAST:
            yield ", ".join(key[:4]), [_typical(measured) for measured in commands.values()]


def _typical(measured: Sequence[Published]) -> Published:
    """Return the one whose time is the (lower) median."""
    return sorted(measured, key=lambda one: one.measured)[(len(measured) - 1) // 2]


def published() -> Iterator[Ranking]:
    """Yield the rankings, the measured ones first."""
    accounts = compared()
    for name, runs in sorted(groups(), key=lambda each: each[1][0].row.family in COMPUTED):
        ours = sorted(runs, key=lambda one: one.forecast)
        fastest = min(one.measured for one in runs)
        first, three = ours[0].measured / fastest, min(one.measured for one in ours[:3]) / fastest
        rank = float(spearmanr([one.forecast for one in runs], [one.measured for one in runs]).statistic)
        errors = [math.log(one.forecast / one.measured) for one in runs]
        apart = [(one - other) ** 2 / 2 for one, other in itertools.combinations(errors, 2)]
        shared = 1 - sum(apart) / len(apart) / (sum(error**2 for error in errors) / len(errors))
        known = [one for one in ours if one.row.id in accounts]
        inside = [in_interval(other, one, accounts) for one, other in itertools.combinations(known, 2)]
        yield Ranking(
            name, runs[0].row.family in COMPUTED, len(runs), len({one.row.tokens for one in runs}), three == 1,
            3 / len(runs), first, three, rank, shared, len(inside), sum(inside),
        )  # fmt: skip


def in_interval(slower: Published, faster: Published, accounts: dict[str, Account]) -> bool:
    """Return whether the measured ratio of two runs lies in the interval that a search tells of their comparison."""
    mine, other = accounts[slower.row.id], accounts[faster.row.id]
    gpu, across = preset(device_of(slower.row)), slower.row.ranks > SERVER
    forecast = ratio(mine, other, forecast_range(gpu, stack_of(slower.row), across))
    scale = faster.row.tokens / slower.row.tokens
    return abs(slower.measured / faster.measured - forecast.value * scale) <= forecast.error * scale


def compared() -> dict[str, Account]:
    """Return the kept accounts of the runs of measured rankings, by the run."""
    text = json.loads(COMPARED.read_text(encoding="utf-8")) if COMPARED.exists() else {"accounts": {}}
    return msgspec.convert(text["accounts"], dict[str, Account])


def simulate_rankings(folder: Path) -> None:
    """Simulate the runs of measured rankings as a search does, and keep their accounts."""
    rows = [one.row for _, runs in groups() for one in runs if one.row.family not in COMPUTED]
    asked = {}
    for row in rows:
        where = f"{row.cluster},device={device_of(row)},ranks=0-{row.ranks - 1}"
        asked[row.id] = RecipeRun(
            RunSetting(where, factor=stack_of(row)), (str(HERE / "accuracy" / row.script), *row.argv), STEPS
        )
    with ResultStore(folder, RunResult) as store, workers(None, "processes", None) as pool:
        missing = [one for one in asked.values() if one.id not in store.found]
        with searching() as progress, pool.results(run, missing) as results:
            try:
                for done, outcome in enumerate(results):
                    store.add([outcome])
                    progress("published runs", done + 1, len(missing))
            finally:  # interrupted, what is done is kept
                keep({name: store.found[one.id] for name, one in asked.items() if one.id in store.found})


def keep(found: dict[str, RunResult]) -> None:
    """Write the accounts of runs; of those that have none, say why."""
    lines = []
    for name, outcome in sorted(found.items()):
        if outcome.account is None:
            print(f"{name}: {outcome.reason}")
        else:
            lines.append(f"{json.dumps(name)}: {msgspec.json.encode(rounded(outcome.account)).decode()}")
    head = json.dumps({"date": str(datetime.date.today()), **machine()})[:-1]
    COMPARED.write_text(f'{head}, "accounts": {{\n' + ",\n".join(lines) + "\n}}\n", encoding="utf-8")


def rounded(account: Account) -> Account:
    """Return an account with seven digits of each number, which a diff shows well."""
    numbers = {
        name: float(f"{value:.7g}")
        for name in Account.__struct_fields__
        if name != "kernels" and (value := getattr(account, name)) is not None
    }
    kernels = {name: float(f"{value:.7g}") for name, value in account.kernels.items()}
    return Account(**numbers, kernels=kernels)


def show(rankings: Sequence[Ranking]) -> None:
    """Print rankings, and what the errors of measured runs share."""
    for one in rankings:
        print(
            f"{'computed' if one.computed else 'measured'}: {one.name:60} {one.runs:3} runs, {one.batches} batches  "
            f"fastest in our first three: {_YES[one.top]} (by chance {one.chance:.0%})  "
            f"our first takes {one.first:.2f} times as long, the best of our first three {one.three:.2f}  "
            f"Spearman {one.rank:6.3f}  shared {one.shared:5.2f}  {one.inside} of {one.pairs} pairs in their interval"
        )
    alike = [one.shared for one in rankings if not one.computed and one.batches == 1]
    print(f"shared, in the median of measured rankings of one batch: {median(alike):.2f}")


def main() -> None:
    """Simulate if asked, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", type=Path, metavar="FOLDER", help="simulate the runs, and keep that")
    arguments = parser.parse_args()
    if arguments.simulate:
        simulate_rankings(arguments.simulate)
    show([*published()])


if __name__ == "__main__":
    main()
