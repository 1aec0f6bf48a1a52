"""The search for recipes: against trying everything, and against published rankings.

Spaces that can be exhausted: of each, every recipe is simulated whole, and then it is searched with nothing known.
Regret is how much longer the search's winner takes than the best of all; the CPU share is what both computed, counted
by the system, so that it does not depend on what else runs. Published rankings: runs of accuracy/groundtruth-train.csv
that differ in their parallelism alone; is the fastest that was measured among the three that are forecast to be?

    python benchmarks/search.py                 the same as --full: hours
    python benchmarks/search.py --quick         one small space
    python benchmarks/search.py --space NAME    only this one of the full spaces, or published
    python benchmarks/search.py --shared        the share of errors that runs of one model have in common
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from measure import finish, options

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "accuracy"))

from rows import Row, read  # noqa: E402, its folder is no package
from scipy.stats import spearmanr  # noqa: E402

from foretrain.experiments.execution import workers  # noqa: E402
from foretrain.experiments.result_store import ResultStore  # noqa: E402
from foretrain.recipe_search import search  # noqa: E402
from foretrain.recipe_search.evaluation import RecipeRun, RunResult, RunSetting, run  # noqa: E402

ACCURACY = HERE.parent / "docs/live/accuracy.md"
LONG = 400
"""Micro-batches that a simulation of a published run may execute."""
LEAST = 4
"""Runs that make a ranking."""


@dataclass(frozen=True)
class Case:
    """A space to exhaust.

    Attributes:
        name: of the model and the cluster.
        cluster: where.
        script: with ``{name}`` for values.
        space: its values and conditions.
    """

    name: str
    cluster: str
    script: tuple[str, ...]
    space: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What a search of a case found, against trying everything.

    Attributes:
        regret: the winner's time over the best of all, less 1.
        share: of CPU.
        recipes: of the space.
        seconds: that the search took.
        error: largest of the extended forecasts.
    """

    name: str
    regret: float
    share: float
    recipes: int
    seconds: float
    error: float


def megatron(name: str, cluster: str, batch: int, layers: int, hidden: int, small: bool = False) -> Case:
    """A GPT by Megatron's parallelism."""
    model = ("--model", "gpt", "--words", 51200, "--hidden", hidden, "--heads", hidden // 128, "--layers", layers)
    words = ("--global-batch", batch, "--dtype", "bf16", "--attention", "flash", "--fuse", "--steps", 9)
    places = ("--tp", "{tp}", "--pp", "{pp}", "--micro-batch", "{mbs}", "--recompute", "{recompute}")
    return Case(
        f"{name} on {cluster}",
        cluster,
        tuple(map(str, (HERE / "accuracy/megatron.py", *model, *words, *places))),
        {
            "values": {
                "tp": [1, 2] if small else [1, 2, 4, 8],
                "pp": [1, 2] if small else [1, 2, 4],
                "mbs": [1, 2] if small else [1, 2, 4],
                "recompute": ["none"] if small else ["none", "full"],
            },
            "derived": {"dp": "world // (tp * pp)"},
            "flags": {"global_batch": "--global-batch", "layers": "--layers"},
            "require": ["global_batch % (dp * mbs) == 0", "global_batch // (dp * mbs) >= pp", "layers % pp == 0"],
            "memory": {"grows": ["mbs"]},
            "batch": "global_batch",
            "short": {"global_batch": "dp * mbs * pp", "layers": "pp"},
            "tokens": "global_batch * 2048",
        },
    )


def llama(cluster: str, model: str) -> Case:
    """Llama by torchtitan's parallelism: FSDP2 and tensor parallel."""
    words = ("--model", model, "--sequence", 4096, "--batch", "{batch}", "--tp", "{tp}")
    return Case(
        f"{model} on {cluster}",
        cluster,
        tuple(map(str, (HERE / "accuracy/llama.py", *words, "--recompute", "{recompute}", "--steps", 9))),
        {
            "values": {
                "tp": [1, 2, 4, 8],
                "batch": [1, 2, 3, 4, 6, 8],
                "recompute": ["none", "selective", "layers", "full"],
            },
            "memory": {"grows": ["batch"]},
            "tokens": "batch * 4096 * world // tp",
        },
    )


FULL = (
    megatron("GPT 7B", "dgx-h100:4", 512, 32, 4096),
    megatron("GPT 7B", "dgx-a100:4", 512, 32, 4096),
    megatron("GPT 30B", "dgx-h100:8", 512, 48, 7168),
    megatron("GPT 30B", "dgx-a100:8", 512, 48, 7168),
    llama("dgx-h100:4", "llama3-8b"),
    llama("dgx-a100:4", "llama3-8b"),
)
QUICK = megatron("GPT 1B", "dgx-h100:1", 256, 16, 2048, small=True)


def exhausted(case: Case) -> Outcome:
    """Search a case with and without trying everything."""
    every = search(case.script, case.space, case.cluster, exhaustive=True)
    began = time.perf_counter()
    found = search(case.script, case.space, case.cluster)
    seconds = time.perf_counter() - began
    best, winner = every.found.winner, found.found.winner
    truth = every.found.candidates[winner.recipe.number]
    assert best.account is not None
    regret = math.inf
    if truth.account is not None:
        tokens = (best.recipe.tokens or 1) / (truth.recipe.tokens or 1)
        regret = truth.account.time / best.account.time * tokens - 1
    share = found.found.cpu / every.found.cpu
    return Outcome(case.name, regret, share, len(every.found.candidates), seconds, found.found.error)


def published() -> Iterator[tuple[str, bool, float]]:
    """Yield of each published ranking its name, whether the fastest is in our first three, and Spearman's rank."""
    groups: dict[object, list[Row]] = defaultdict(list)
    for row in read()[0]:
        if row.micro_batches <= LONG:
            groups[row.family, row.model, row.precision, row.gpu, row.ranks, row.tokens].append(row)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        store = stack.enter_context(ResultStore(Path(folder) / "store", RunResult))
        pool = stack.enter_context(workers(None, "processes", None))
        for rows in groups.values():
            if len({row.argv for row in rows}) < LEAST:
                continue
            runs = {_run_of(row).id: row for row in rows}
            with pool.results(run, [_run_of(row) for row in runs.values()]) as results:
                for done in results:
                    store.add([done])
            pairs = [
                (account.time, row.seconds) for name, row in runs.items() if (account := store.found[name].account)
            ]
            if len(pairs) < LEAST:
                continue
            ours = sorted(range(len(pairs)), key=lambda index: pairs[index][0])
            fastest = min(range(len(pairs)), key=lambda index: pairs[index][1])
            rank = float(spearmanr(*zip(*pairs, strict=True)).statistic)
            name = f"{rows[0].family}, {rows[0].model}, {rows[0].ranks} {rows[0].gpu}, {len(pairs)} runs"
            yield name, fastest in ours[:3], rank


def _run_of(row: Row) -> RecipeRun:
    servers, _, rest = row.cluster.partition(",")
    first = "" if row.ranks % 8 == 0 else f",ranks=0-{row.ranks - 1}"
    return RecipeRun(
        RunSetting(f"{servers}{first}{',' + rest if rest else ''}"),
        (str(HERE / "accuracy" / row.script), *row.argv, "--steps", "2"),
        2,
    )


def shared() -> tuple[float, int]:
    """Share of the errors' variance that runs of one model on the same GPUs have in common, and of how many pairs.

    Of torchtitan's runs, since docs/live/accuracy.md lists all of them; of others only those furthest off.
    """
    rows = re.findall(
        r"^\| (torchtitan-\d+): (.+?) \| ([\d.]+) s \| ([\d.]+) s \|", ACCURACY.read_text(encoding="utf-8"), re.M
    )
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for name, model, forecast, measured in rows:
        groups[model][name] = math.log(float(forecast) / float(measured))
    pairs = [pair for errors in groups.values() for pair in itertools.combinations(errors.values(), 2)]
    apart = sum((one - other) ** 2 / 2 for one, other in pairs)
    return 1 - apart / sum((one**2 + other**2) / 2 for one, other in pairs), len(pairs)


def own_options(parser: argparse.ArgumentParser) -> None:
    """--space, --shared."""
    parser.add_argument("--space", action="append", metavar="NAME", help="only spaces with this in their name")
    parser.add_argument("--shared", action="store_true", help="only the share of errors that runs have in common")


def chosen(arguments: argparse.Namespace) -> Sequence[Case]:
    if arguments.quick:
        return (QUICK,)
    return [case for case in FULL if not arguments.space or any(name in case.name for name in arguments.space)]


def main() -> None:
    """Search, print, and write JSON if asked."""
    arguments = options(__doc__ or "", own_options)
    if arguments.shared:
        value, pairs = shared()
        print(f"shared {value:.2f} of {pairs} pairs")
        return
    found: list[Outcome] = []
    for case in chosen(arguments):
        one = exhausted(case)
        found.append(one)
        print(
            f"{one.name:28} {one.recipes:4} recipes  regret {one.regret:.2%}  {one.share:.1%} of the CPU of all  "
            f"{one.seconds:.0f} s  extended forecasts within {one.error:.2%}",
            flush=True,
        )
    rankings: list[tuple[str, bool, float]] = []
    if not arguments.quick and (not arguments.space or "published" in arguments.space):
        for name, top, rank in published():
            rankings.append((name, top, rank))
            print(f"{name:60} fastest in our first three: {'yes' if top else 'no':3}  Spearman {rank:.3f}", flush=True)
    nothing = math.nan
    results = {
        "regret_max": max((one.regret for one in found), default=nothing),
        "cpu_share": max((one.share for one in found), default=nothing),
        "candidates_per_min": min((60 * one.recipes / one.seconds for one in found), default=nothing),
        "top3_share": sum(top for _, top, _ in rankings) / len(rankings) if rankings else nothing,
        "spearman_median": median(rank for _, _, rank in rankings) if rankings else nothing,
    }
    finish(arguments, "search", results, {"spaces": [asdict(one) for one in found], "rankings": rankings})


if __name__ == "__main__":
    main()
