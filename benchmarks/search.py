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
accuracy.py has kept; is the fastest that was measured among the three that are forecast to be? Runs that were published
as measured but that a model computed are ranked apart, and do not count. How often a measured ratio of two recipes lies
in the interval of their comparison is told by simulations that published_rankings.py has kept in data/rankings.json.

    python benchmarks/search.py                   the same as --full: all spaces, and one that is too large to exhaust;
                                                  a space of which nothing is kept is exhausted first, in hours
    python benchmarks/search.py --quick           one space
    python benchmarks/search.py --space NAME      only those with this in their names
    python benchmarks/search.py --store FOLDER    keeps what was simulated, and how long it took: interrupted, the same
                                                  command goes on, and counts the time of all its parts
    python benchmarks/search.py --torchtitan DIR  only torchtitan's own Llama-3-70B: a checkout of the commit which
                                                  compatibility/third_party.toml names, with its packages
    python benchmarks/search.py --published       only goodput and the published rankings, in a minute
    python benchmarks/search.py --exhaust FOLDER  simulates spaces whole and keeps that; goes on from what FOLDER has;
                                                  with --quick or --space, of those alone

Of the RESULT, regret_max and cpu_share are of the spaces that were exhausted, candidates_per_min of the slowest of all
that were searched: of torchtitan's own with --torchtitan. Each is nan where none was. The others are the same whatever
is searched.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import chdir, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from measure import finish, machine, options
from published_rankings import Ranking, published, show
from third_party import DATA, OFFLINE

from foretrain.cli.progress import searching
from foretrain.recipe_search import search
from foretrain.recipe_search.bill import (
    Failures,
    Stragglers,
    best_interval,
    goodput,
    simulated_goodput,
)
from foretrain.recipe_search.strategy import SearchFindings

HERE = Path(__file__).parent
KEPT = HERE / "data/search.json"
"""Whole simulations of all recipes of the spaces below."""
HOUR = 3600.0
SIMULATED_FAILURES = 10_000
"""Mean times between failures that a simulation of goodput works for."""


@dataclass(frozen=True)
class Case:
    """A space to search.

    Attributes:
        name: of the model and the cluster.
        cluster: where.
        script: with ``{name}`` for values.
        space: its values and conditions, or the file that has them.
        jobs: workers; as many as this machine has cores where None.
        module: the script is a module's name.
    """

    name: str
    cluster: str
    script: tuple[str, ...]
    space: dict[str, Any] | Path
    jobs: int | None = None
    module: bool = False


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
SPACE_FILES = HERE.parent / "examples/search"
TORCHTITAN = Case(
    "torchtitan's Llama-3-70B on dgx-h100:8",
    "dgx-h100:8",
    (
        *("torchtitan.train", "--module", "torchtitan_layers", "--hf_assets_path", "tests/assets/tokenizer"),
        *("--training.num_tokens_per_train_step=4194304", "--training.max_context_length=8192"),
        "--parallelism.pipeline_parallel_degree=1",
    ),
    SPACE_FILES / "llama3_70b.toml",
    jobs=2,
    module=True,
)
"""The same by torchtitan itself."""
UNKNOWN = (LARGE, TORCHTITAN)
"""Nobody knows how good their best is."""


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
            case.script, case.space, case.cluster, module=case.module, exhaustive=exhaustive, store=store,
            jobs=case.jobs, progress=told,
        ).found  # fmt: skip
    return found, passed()


def explored(case: Case, folder: Path) -> Outcome:
    """Search a case of which nothing is known."""
    found, seconds = found_in(case, folder)
    print(f"{case.name}: {found.winner.recipe} is best; {found.cpu:.0f} s of CPU, {found.runs} simulations")
    return Outcome(case.name, math.nan, math.nan, len(found.candidates), len(found.ranked), seconds, found.error)


@contextmanager
def copied(checkout: Path) -> Iterator[None]:
    """Work in a copy of torchtitan's checkout, with the data that it would download, and our configurations."""
    with TemporaryDirectory() as scratch:
        copy = Path(scratch, "torchtitan")
        shutil.copytree(checkout, copy, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        os.environ |= OFFLINE
        os.environ["PYTHONPATH"] = os.pathsep.join([str(SPACE_FILES), os.environ.get("PYTHONPATH", "")])
        with chdir(copy):
            subprocess.run([sys.executable, DATA, "c4"], check=True)
            yield


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
    """--space, --store, --torchtitan, --published, --exhaust."""
    parser.add_argument("--space", action="append", metavar="NAME", help="only spaces with this in their name")
    parser.add_argument("--store", type=Path, metavar="FOLDER", help="keep what was simulated, and go on from there")
    parser.add_argument("--torchtitan", type=Path, metavar="DIR", help="only torchtitan's own, in this checkout")
    parser.add_argument("--published", action="store_true", help="only goodput and the published rankings")
    parser.add_argument("--exhaust", type=Path, metavar="FOLDER", help="simulate spaces whole, and keep that")


def check(arguments: argparse.Namespace) -> None:
    """Raise SystemExit where options contradict each other."""
    given = {f"--{name}" for name, value in vars(arguments).items() if value}
    groups = [("--quick", "--space", "--torchtitan", "--published")]
    groups += [("--exhaust", name) for name in ("--torchtitan", "--published", "--store")]
    groups += [("--store", "--published")]
    for group in groups:
        if len(both := [name for name in group if name in given]) > 1:
            raise SystemExit(f"{' and '.join(both)}: give one of them")


def chosen(arguments: argparse.Namespace) -> Sequence[Case]:
    """Return the cases to search, or to exhaust."""
    if arguments.published:
        return ()
    if arguments.torchtitan:
        return (TORCHTITAN,)
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
    check(arguments)
    if arguments.exhaust:
        for case in chosen(arguments):
            exhaust(case, arguments.exhaust)
            print(f"{case.name}: kept", flush=True)
        return
    found: list[Outcome] = []
    store = arguments.store and arguments.store.absolute()
    with TemporaryDirectory() as scratch, copied(arguments.torchtitan) if arguments.torchtitan else nullcontext():
        for case in chosen(arguments):
            one = (explored if case in UNKNOWN else searched)(case, store or Path(scratch))
            found.append(one)
            print(
                f"{one.name:24} {one.recipes:4} recipes, {one.whole:3} whole  regret {one.regret:.2%}  "
                f"{one.share:.1%} of the CPU of all  {one.seconds:.0f} s  extended forecasts within {one.error:.2%}",
                flush=True,
            )
    rankings = list(published())
    show(rankings)
    goodput_error = max(goodput_errors())
    print(f"goodput by the closed form is within {goodput_error:.2%} of the simulation")
    results = {**of_spaces(found), **of_rankings(rankings), "goodput_error_max": goodput_error}
    details = {"spaces": [asdict(one) for one in found], "rankings": [asdict(one) for one in rankings]}
    finish(arguments, "search", results, details)


def of_spaces(found: Sequence[Outcome]) -> dict[str, float]:
    """Return the results of the spaces that were searched, nan where there are none."""
    known = [one for one in found if one.name not in {case.name for case in UNKNOWN}]
    return {
        "regret_max": max((one.regret for one in known), default=math.nan),
        "cpu_share": max((one.share for one in known), default=math.nan),
        "candidates_per_min": min((60 * one.recipes / one.seconds for one in found), default=math.nan),
    }


def of_rankings(rankings: Iterable[Ranking]) -> dict[str, float]:
    """Return the results of the rankings that were measured."""
    measured = [one for one in rankings if not one.computed]
    alike = [one for one in measured if one.batches == 1]
    pairs = sum(one.pairs for one in measured)
    return {
        "top3_share": sum(one.top for one in measured) / len(measured),
        "spearman_median": median(one.rank for one in measured),
        "top3_share_one_batch": sum(one.top for one in alike) / len(alike),
        "spearman_median_one_batch": median(one.rank for one in alike),
        "pairs_inside": sum(one.inside for one in measured) / pairs if pairs else math.nan,
    }


if __name__ == "__main__":
    main()
