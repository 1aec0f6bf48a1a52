"""The search for recipes: against trying everything, and against published rankings.

Spaces that can be exhausted: of each, every recipe is simulated whole, and then it is searched with nothing known.
Regret is how much longer the search's winner takes than the best of all; the CPU share is what both computed, counted
by the system, so that it does not depend on what else runs. Published rankings: runs of accuracy/groundtruth-train.csv
that differ in their recipe alone, with the forecasts that accuracy.py has kept; is the fastest that was measured among
the three that are forecast to be?

    python benchmarks/search.py                 the same as --full: hours
    python benchmarks/search.py --quick         one small space
    python benchmarks/search.py --space NAME    only those of the full spaces with this in their names
    python benchmarks/search.py --published     only the published rankings, at once
"""

from __future__ import annotations

import argparse
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
from typing import Any

from measure import finish, options

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "accuracy"))

from rows import read  # noqa: E402, its folder is no package
from scipy.stats import spearmanr  # noqa: E402

from foretrain.recipe_search import search  # noqa: E402

KEPT = HERE / "data/accuracy.jsonl"
"""Forecasts of published runs, which benchmarks/accuracy.py has simulated."""
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
                "pp": [1] if small else [1, 2, 4],
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
QUICK = megatron("GPT 0.4B", "dgx-h100:1", 64, 8, 2048, small=True)


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


@dataclass(frozen=True)
class Ranking:
    """Published runs that differ in their recipe alone, and how forecasts rank them.

    Attributes:
        name: of the model and the GPUs.
        runs: how many there are.
        top: whether the fastest as measured is among the first three as forecast; always where there are three.
        rank: Spearman's.
        shared: of the variance of the errors' logarithms, what all have in common.
    """

    name: str
    runs: int
    top: bool
    rank: float
    shared: float


def published() -> Iterator[Ranking]:
    """Yield rankings of the runs whose forecasts benchmarks/accuracy.py has kept."""
    rows = {row.id: row for row in read()[0]}
    groups: dict[object, list[tuple[float, float]]] = defaultdict(list)
    for line in KEPT.read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        if one["failure"] or one["id"] not in rows:
            continue
        row = rows[one["id"]]
        sequence = row.argv[row.argv.index("--sequence") + 1]
        key = (row.family, row.model, row.precision, f"{row.ranks} {row.gpu}", row.tokens, sequence)
        groups[key].append((one["predicted"], one["measured"]))
    for key, pairs in sorted(groups.items(), key=str):
        if len(pairs) < LEAST:
            continue
        ours = sorted(pairs)
        fastest = min(pairs, key=lambda pair: pair[1])
        rank = float(spearmanr(*zip(*pairs, strict=True)).statistic)
        errors = [math.log(forecast / measured) for forecast, measured in pairs]
        apart = [(one - other) ** 2 / 2 for one, other in itertools.combinations(errors, 2)]
        shared = 1 - sum(apart) / len(apart) / (sum(error**2 for error in errors) / len(errors))
        name = ", ".join(map(str, key[:4])) if isinstance(key, tuple) else ""
        yield Ranking(name, len(pairs), fastest in ours[:3], rank, shared)


def own_options(parser: argparse.ArgumentParser) -> None:
    """--space, --published."""
    parser.add_argument("--space", action="append", metavar="NAME", help="only spaces with this in their name")
    parser.add_argument("--published", action="store_true", help="only the published rankings, which simulates nothing")


def chosen(arguments: argparse.Namespace) -> Sequence[Case]:
    if arguments.published:
        return ()
    if arguments.quick:
        return (QUICK,)
    return [case for case in FULL if not arguments.space or any(name in case.name for name in arguments.space)]


def main() -> None:
    """Search, print, and write JSON if asked."""
    arguments = options(__doc__ or "", own_options)
    found: list[Outcome] = []
    for case in chosen(arguments):
        one = exhausted(case)
        found.append(one)
        print(
            f"{one.name:28} {one.recipes:4} recipes  regret {one.regret:.2%}  {one.share:.1%} of the CPU of all  "
            f"{one.seconds:.0f} s  extended forecasts within {one.error:.2%}",
            flush=True,
        )
    rankings = list(published())
    for one in rankings:
        print(
            f"{one.name:60} {one.runs:3} runs  fastest in our first three: {'yes' if one.top else 'no':3}  "
            f"Spearman {one.rank:6.3f}  shared {one.shared:5.2f}"
        )
    print(f"shared, in the median of rankings: {median(one.shared for one in rankings):.2f}")
    nothing = math.nan
    results = {
        "regret_max": max((one.regret for one in found), default=nothing),
        "cpu_share": max((one.share for one in found), default=nothing),
        "candidates_per_min": min((60 * one.recipes / one.seconds for one in found), default=nothing),
        "top3_share": sum(one.top for one in rankings) / len(rankings),
        "spearman_median": median(one.rank for one in rankings),
    }
    finish(
        arguments,
        "search",
        results,
        {"spaces": [asdict(one) for one in found], "rankings": [asdict(one) for one in rankings]},
    )


if __name__ == "__main__":
    main()
