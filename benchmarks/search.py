"""The search for recipes: against trying everything, and against published rankings.

Spaces that were exhausted: of each recipe of six spaces, data/search.json keeps how long a step takes by its whole
simulation, and the CPU time of that. A search that knows nothing of it then looks for the best. Regret is how much
longer its winner takes than the best of all; the CPU share is what it computed over what all whole simulations did,
counted by the system, so that it does not depend on what else runs. Where another machine exhausted the space, the
recipes that both simulated whole tell how fast it was.

Every recipe that a search simulates whole must come out as kept, to the picosecond: otherwise forecasts have changed,
what is kept is stale, and the benchmark ends with the command that makes it anew.

Goodput: over a grid of failures, checkpoints, repairs with spares, and stragglers, how far the closed form is from a
simulation of failures, one by one.

Published rankings: runs of accuracy/groundtruth-train.csv that differ in their recipe alone, with the forecasts that
accuracy.py has kept; is the fastest that was measured among the three that are forecast to be?

    python benchmarks/search.py                   the same as --full: all spaces, and one that is too large to exhaust;
                                                  a space of which nothing is kept is exhausted first, in hours
    python benchmarks/search.py --quick           one space
    python benchmarks/search.py --space NAME      only those with this in their names
    python benchmarks/search.py --store FOLDER    keeps what was simulated, and how long it took: interrupted, the same
                                                  command goes on, and counts the time of all its parts
    python benchmarks/search.py --published       only goodput and the published rankings, in a minute
    python benchmarks/search.py --exhaust FOLDER  simulates spaces whole and keeps that; goes on from what FOLDER has
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from measure import finish, machine, options

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "accuracy"))

from rows import read  # noqa: E402, its folder is no package
from scipy.stats import spearmanr  # noqa: E402

from foretrain.cli.progress import searching  # noqa: E402
from foretrain.recipe_search import search  # noqa: E402
from foretrain.recipe_search.bill import (  # noqa: E402
    Failures,
    Stragglers,
    best_interval,
    goodput,
    simulated_goodput,
)
from foretrain.recipe_search.strategy import SearchFindings  # noqa: E402

FORECASTS = HERE / "data/accuracy.jsonl"
"""Forecasts of published runs, which benchmarks/accuracy.py has simulated."""
KEPT = HERE / "data/search.json"
"""Whole simulations of all recipes of the spaces below."""
HOUR = 3600.0
SIMULATED_FAILURES = 10_000
"""Mean times between failures that a simulation of goodput works for."""
LEAST = 4
"""Runs that make a ranking."""
_YES = {True: "yes", False: "no "}


@dataclass(frozen=True)
class Case:
    """A space to search.

    Attributes:
        name: of the model and the cluster.
        cluster: where.
        script: with ``{name}`` for values.
        space: its values and conditions.
        jobs: workers; as many as this machine has cores where None.
    """

    name: str
    cluster: str
    script: tuple[str, ...]
    space: dict[str, Any]
    jobs: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What a search of a case found, against trying everything.

    Attributes:
        regret: the winner's time over the best of all, less 1.
        share: of CPU.
        recipes: of the space.
        whole: those that the search simulated whole.
        seconds: that the search took, in all its parts where it was interrupted.
        error: largest of the extended forecasts.
    """

    name: str
    regret: float
    share: float
    recipes: int
    whole: int
    seconds: float
    error: float


def megatron(name: str, cluster: str, layers: int, hidden: int) -> Case:
    """A GPT by Megatron's parallelism, 512 sequences a step."""
    model = ("--model", "gpt", "--words", 51200, "--hidden", hidden, "--heads", hidden // 128, "--layers", layers)
    words = ("--global-batch", 512, "--dtype", "bf16", "--attention", "flash", "--steps", 9)
    places = ("--tp", "{tp}", "--pp", "{pp}", "--micro-batch", "{mbs}", "--recompute", "{recompute}")
    return Case(
        f"{name} on {cluster}",
        cluster,
        tuple(map(str, (HERE / "accuracy/megatron.py", *model, *words, *places))),
        {
            "values": {"tp": [1, 2, 4, 8], "pp": [1, 2], "mbs": [1, 2, 4, 8], "recompute": ["none", "full"]},
            "derived": {"dp": "world // (tp * pp)"},
            "flags": {"global_batch": "--global-batch", "layers": "--layers"},
            "require": ["global_batch % (dp * mbs) == 0", "global_batch // (dp * mbs) >= pp", "layers % pp == 0"],
            "memory": {"grows": ["mbs"]},
            "batch": "global_batch",
            "short": {"global_batch": "dp * mbs * pp", "layers": "pp"},
            "tokens": "global_batch * 2048",
            "steps": 2,
        },
    )


SPACES = tuple(
    megatron(name, cluster, layers, hidden)
    for name, layers, hidden in (("GPT 7B", 32, 4096), ("GPT 2.7B", 32, 2560), ("GPT 1.3B", 24, 2048))
    for cluster in ("dgx-h100:4", "dgx-a100:4")
)
QUICK = SPACES[0]
LARGE = Case(
    "Llama-3-70B on dgx-h100:8",
    "dgx-h100:8",
    tuple(map(str, (
        HERE / "accuracy/llama.py", *("--model", "llama3-70b", "--layers", 80, "--sequence", 8192, "--steps", 9),
        *("--tp", "{tp}", "--pp", "{pp}", "--batch", "{batch}", "--microbatches", "{pieces}"),
        *("--recompute", "{recompute}"),
    ))),
    {
        "values": {
            "tp": [1, 2, 4, 8],
            "pp": [1, 2, 4],
            "batch": [1, 2, 3, 4, 6, 8, 16],
            "recompute": ["none", "selective", "layers", "full"],
        },
        "derived": {"pieces": "batch if pp > 1 else 1"},
        "flags": {"layers": "--layers"},
        "require": ["batch >= pp", "tp * pp <= gpus"],
        "memory": {"grows": ["batch"], "shrinks": ["tp"]},
        "batch": "batch",
        "short": {"batch": "pp if pp > 1 else batch", "layers": "2 * pp"},  # two, as every other may be recomputed
        "short_from": 4.0,
        "tokens": "batch * 8192 * world // (tp * pp)",
        "steps": 2,
    },
    jobs=2,
)  # fmt: skip
"""Torchtitan's way on 64 GPUs: too large to exhaust."""


def kept() -> dict[str, Any]:
    """Return what was exhausted, by the case's name."""
    return json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}


def exhaust(case: Case, folder: Path) -> None:
    """Simulate all recipes of a case whole, and keep how long a step of each takes, why not, and at what CPU time."""
    found, _ = found_in(case, folder, exhaustive=True)
    rows = {}
    for one in found.candidates:
        cpu = one.outcome.cpu if one.outcome else 0.0  # none where it needs more memory than one that had too little
        rows[str(one.recipe)] = [one.account.time if one.account else one.status, round(cpu, 2)]
    every = kept() | {case.name: {"date": str(datetime.date.today()), **machine(), "recipes": rows}}
    lines = []
    for name in sorted(every):
        recipes = every[name].pop("recipes")
        shown = ",\n".join(f"  {json.dumps(each)}: {json.dumps(row)}" for each, row in recipes.items())
        lines.append(f'{json.dumps(name)}: {json.dumps(every[name])[:-1]}, "recipes": {{\n{shown}\n }}}}')
    KEPT.write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")


def found_in(case: Case, folder: Path, *, exhaustive: bool = False) -> tuple[SearchFindings, float]:
    """Search a case, going on from what ``folder`` has; return the findings, and the seconds of all parts."""
    store = folder / case.name
    store.mkdir(parents=True, exist_ok=True)
    clock = folder / f"{case.name}.seconds"
    before, began = float(clock.read_text("utf-8")) if clock.exists() else 0.0, time.perf_counter()

    def passed() -> float:
        """Write down the seconds so far, for a search that goes on, and return them."""
        seconds = before + time.perf_counter() - began
        clock.write_text(f"{seconds:.1f}", encoding="utf-8")
        return seconds

    with searching() as progress:

        def told(what: str, done: int, total: int) -> None:
            passed()
            progress(what, done, total)

        found = search(
            case.script, case.space, case.cluster, exhaustive=exhaustive, store=store, jobs=case.jobs, progress=told
        ).found
    return found, passed()


def explored(case: Case, folder: Path) -> Outcome:
    """Search a case of which nothing is known."""
    found, seconds = found_in(case, folder)
    print(f"{case.name}: {found.winner.recipe} is best; {found.cpu:.0f} s of CPU, {found.runs} simulations")
    return Outcome(case.name, math.nan, math.nan, len(found.candidates), len(found.ranked), seconds, found.error)


def stale(case: Case, why: str) -> SystemExit:
    return SystemExit(f"{case.name}: what {KEPT.name} keeps is stale: {why}. Make it anew: python benchmarks/search.py "
                      f"--exhaust FOLDER --space '{case.name}'")  # fmt: skip


def searched(case: Case, folder: Path) -> Outcome:
    """Search a case, and compare with what is kept of it; where nothing is, that is made first."""
    if case.name not in kept():
        exhaust(case, folder / "exhausted")
    truth: dict[str, tuple[float | str, float]] = kept()[case.name]["recipes"]
    found, seconds = found_in(case, folder)
    if [*truth] != [str(one.recipe) for one in found.candidates]:
        raise stale(case, "the space has other recipes now")
    here = there = 0.0
    for one in found.ranked:
        assert one.account is not None
        assert one.outcome is not None
        time_kept, cpu = truth[str(one.recipe)]
        if time_kept != one.account.time:
            raise stale(case, f"{one.recipe} takes {one.account.time!r} s where {time_kept!r} is kept")
        here, there = here + one.outcome.cpu, there + cpu
    best = min(value for value, _ in truth.values() if isinstance(value, float))
    winner = found.winner.account
    assert winner is not None
    share = found.cpu / (sum(cpu for _, cpu in truth.values()) * here / there)
    whole = len(found.ranked)
    return Outcome(case.name, winner.time / best - 1, share, len(truth), whole, seconds, found.error)


@dataclass(frozen=True)
class Ranking:
    """Published runs that differ in their recipe alone, and how forecasts rank them, by the time of a token.

    Attributes:
        name: of the model and the GPUs.
        runs: how many there are.
        batches: how many batches there are among them; where it is more than one, recipes differ in that as well.
        top: whether the fastest as measured is among the first three as forecast; always where there are three.
        first: measured time of the recipe that is forecast to be fastest, over that of the fastest as measured.
        three: the same of the best of the first three, for who measures these.
        rank: Spearman's.
        shared: of the variance of the errors' logarithms, what all have in common.
    """

    name: str
    runs: int
    batches: int
    top: bool
    first: float
    three: float
    rank: float
    shared: float


def published() -> Iterator[Ranking]:
    """Yield rankings of the runs whose forecasts benchmarks/accuracy.py has kept."""
    rows = {row.id: row for row in read()[0]}
    groups: dict[object, list[tuple[float, float]]] = defaultdict(list)
    batches: dict[object, set[float]] = defaultdict(set)
    for line in FORECASTS.read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        if one["failure"] or one["id"] not in rows:
            continue
        row = rows[one["id"]]
        sequence = row.argv[row.argv.index("--sequence") + 1]
        key = (row.family, row.model, row.precision, f"{row.ranks} {row.gpu}", sequence)
        groups[key].append((one["predicted"] / row.tokens, one["measured"] / row.tokens))
        batches[key].add(row.tokens)
    for key, pairs in sorted(groups.items(), key=str):
        if len(pairs) < LEAST:
            continue
        ours = sorted(pairs)
        fastest = min(measured for _, measured in pairs)
        first, three = ours[0][1] / fastest, min(measured for _, measured in ours[:3]) / fastest
        rank = float(spearmanr(*zip(*pairs, strict=True)).statistic)
        errors = [math.log(forecast / measured) for forecast, measured in pairs]
        apart = [(one - other) ** 2 / 2 for one, other in itertools.combinations(errors, 2)]
        shared = 1 - sum(apart) / len(apart) / (sum(error**2 for error in errors) / len(errors))
        name = ", ".join(map(str, key[:4])) if isinstance(key, tuple) else ""
        yield Ranking(name, len(pairs), len(batches[key]), three == 1, first, three, rank, shared)


def goodput_errors() -> Iterator[float]:
    """Yield how far goodput by the closed form is from the simulation, relatively, at the best interval."""
    repairs = ((0.0, 0), (4 * HOUR, 1), (24 * HOUR, 2))
    slow_times = ((6 * HOUR, HOUR, 1.0), (6 * HOUR, HOUR, 1.4), (24 * HOUR, 12 * HOUR, 1.25), (2 * HOUR, 300.0, 2.0))
    checkpoints = ((10.0, 0.0), (120.0, 0.0), (2.0, 120.0))  # the last is written in the background
    grid = itertools.product((6 * HOUR, 24 * HOUR), checkpoints, repairs, slow_times)
    for mtbf, (checkpoint, written), (repair, spares), (every, lasts, slowdown) in grid:
        failures = Failures(
            mtbf, checkpoint, 300.0, repair, spares, stragglers=Stragglers(every, lasts, 0.5), slowdown=slowdown,
            written=written,
        )  # fmt: skip
        interval = best_interval(failures)
        simulated = simulated_goodput(failures, interval, work=SIMULATED_FAILURES * mtbf)
        yield abs(goodput(failures, interval) / simulated - 1)


def own_options(parser: argparse.ArgumentParser) -> None:
    """--space, --store, --published, --exhaust."""
    parser.add_argument("--space", action="append", metavar="NAME", help="only spaces with this in their name")
    parser.add_argument("--store", type=Path, metavar="FOLDER", help="keep what was simulated, and go on from there")
    parser.add_argument("--published", action="store_true", help="only goodput and the published rankings")
    parser.add_argument("--exhaust", type=Path, metavar="FOLDER", help="simulate spaces whole, and keep that")


def chosen(arguments: argparse.Namespace) -> Sequence[Case]:
    if arguments.published:
        return ()
    if arguments.quick:
        return (QUICK,)
    spaces = SPACES if arguments.exhaust else (*SPACES, LARGE)
    for name in arguments.space or ():
        if not any(name in case.name for case in spaces):
            there = ", ".join(case.name for case in spaces)
            raise SystemExit(f"--space {name!r}: no space has this in its name; there are {there}")
    return [case for case in spaces if not arguments.space or any(name in case.name for name in arguments.space)]


def main() -> None:
    """Search, print, and write JSON if asked."""
    arguments = options(__doc__ or "", own_options)
    if arguments.exhaust:
        for case in chosen(arguments):
            exhaust(case, arguments.exhaust)
            print(f"{case.name}: kept", flush=True)
        return
    found: list[Outcome] = []
    with TemporaryDirectory() as scratch:
        for case in chosen(arguments):
            one = (explored if case is LARGE else searched)(case, arguments.store or Path(scratch))
            found.append(one)
            print(
                f"{one.name:24} {one.recipes:4} recipes, {one.whole:3} whole  regret {one.regret:.2%}  "
                f"{one.share:.1%} of the CPU of all  {one.seconds:.0f} s  extended forecasts within {one.error:.2%}",
                flush=True,
            )
    rankings = list(published())
    alike = [one for one in rankings if one.batches == 1]
    for one in rankings:
        print(
            f"{one.name:60} {one.runs:3} runs, {one.batches} batches  fastest in our first three: {_YES[one.top]}  "
            f"our first takes {one.first:.2f} times as long, the best of our first three {one.three:.2f}  "
            f"Spearman {one.rank:6.3f}  shared {one.shared:5.2f}"
        )
    print(f"shared, in the median of rankings of one batch: {median(one.shared for one in alike):.2f}")
    goodput_error = max(goodput_errors())
    print(f"goodput by the closed form is within {goodput_error:.2%} of the simulation")
    nothing = math.nan
    results = {
        "regret_max": max((one.regret for one in found if one.name != LARGE.name), default=nothing),
        "cpu_share": max((one.share for one in found if one.name != LARGE.name), default=nothing),
        "candidates_per_min": min((60 * one.recipes / one.seconds for one in found), default=nothing),
        "top3_share": sum(one.top for one in rankings) / len(rankings),
        "spearman_median": median(one.rank for one in rankings),
        "goodput_error_max": goodput_error,
        "top3_share_one_batch": sum(one.top for one in alike) / len(alike),
        "spearman_median_one_batch": median(one.rank for one in alike),
    }
    finish(
        arguments,
        "search",
        results,
        {"spaces": [asdict(one) for one in found], "rankings": [asdict(one) for one in rankings]},
    )


if __name__ == "__main__":
    main()
