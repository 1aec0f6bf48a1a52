"""Forecasts of published training runs against what was measured.

Each row of accuracy/groundtruth-train.csv that a plain PyTorch script can repeat (accuracy/rows.py) is simulated as
`foretrain simulate` would: the script unmodified, on the row's GPUs and network, all ranks of a kind folded. Nothing is
timed here; what is compared is the time of an iteration and the peak of reserved memory.

One constant is fitted for each pair of GPU and framework, on one or two rows each: that by which all operators' times
are multiplied (`ANCHORS`), or where published runs are bound by the host, that by which its launches are
(`HOST_ANCHORS`). foretrain/device/stacks.toml has the outcome. Everything else is what any simulation uses.

    python benchmarks/accuracy.py                      every row but those that take long, and of the family of 797
                                                       rows on one server 60
    python benchmarks/accuracy.py --full               every row, many hours
    python benchmarks/accuracy.py --quick              three rows
    python benchmarks/accuracy.py --fit                the constants anew, from their rows
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from measure import finish, machine, options

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "accuracy"))

from page import PREFACE, scatter, table  # noqa: E402, its folder is no package
from rows import DATA, Row, read  # noqa: E402

PAGE = HERE.parent / "docs/live/accuracy.md"
PICTURE = HERE.parent / "docs/_static/accuracy.svg"

STEPS = 2
"""One to warm up, in which optimizer states and buffers are made, and one to measure; the others would be alike."""

DEVICES = {
    "a100-40gb": "A100-40GB",
    "a100-80gb": "A100",
    "h100-80gb": "H100",
    "h100-96gb-hbm2e-500w": "H100-HBM2e",
    "h200": "H200",
    "b200": "B200",
}
"""Presets by the rows' names of GPUs."""

STACKS = {
    "torchtitan": "torchtitan",
    "fmsfsdp": "fms-fsdp",
    "llmfoundry": "llm-foundry",
    "vtrain-single": "megatron-deepspeed",
    "vtrain-multi": "megatron-deepspeed",
    "korthikanti22": "megatron",
    "dgxc": "nemo",
    "mbridge": "nemo",
    "simumax-b200": "megatron",
    "neusight": "neusight",
}
"""Names of stacks by family."""

SAMPLED = {"vtrain-single": 60}
"""Of large families, how many rows to take unless all are asked for."""

LONG = 2500
"""Micro-batches that a simulation may execute, over all of its live ranks, to be taken unless all are asked for; about
five minutes on a machine with 2 cores."""

QUICK = ("torchtitan-0001", "torchtitan-0036", "llmfoundry-0089")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row and its forecast.

    Attributes:
        predicted, measured: seconds of an iteration.
        memory, memory_measured: peak bytes reserved on a GPU; None where not published.
        failure: why there is no forecast.
        wall: seconds that the simulation took.
    """

    id: str
    family: str
    model: str
    device: str
    stack: str
    ranks: int
    measured: float
    predicted: float | None = None
    memory: int | None = None
    memory_measured: int | None = None
    failure: str = ""
    wall: float = 0.0

    @property
    def error(self) -> float:
        """Of the iteration's time, relative."""
        assert self.predicted is not None
        return self.predicted / self.measured - 1

    @property
    def memory_error(self) -> float | None:
        """Of the peak memory, relative."""
        if not self.memory or not self.memory_measured:
            return None
        return self.memory / self.memory_measured - 1


def outcome(row: Row, factor: float | None = None, host: float | None = None) -> Outcome:
    """Simulates ``row``; with the stack's own factors of operators and of the host, or others."""
    from foretrain.device import HOST_LAUNCH
    from foretrain.errors import ForetrainError
    from foretrain.live.simulate import simulate
    from foretrain.network.deployment_notation import deployment

    device, stack = DEVICES[row.gpu], STACKS[row.family]
    known = Outcome(row.id, row.family, row.model, device, stack, row.ranks, row.seconds, memory_measured=row.memory)
    launch = None if host is None else round(HOST_LAUNCH * host)
    chosen = ",ranks=0-" + str(row.ranks - 1)
    where = deployment(f"{row.cluster},device={device}{chosen}").carried_by("nccl")
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        kept = _redirected(said.fileno())
        try:
            script = [str(HERE / "accuracy" / row.script), *row.argv]
            found = simulate(
                script, where, steps=STEPS, factor=stack if factor is None else factor, host=launch
            ).forecast
        except ForetrainError as error:
            said.seek(0)
            lines = [line for line in said.read().decode(errors="replace").splitlines() if "Error" in line]
            reason = (lines or [str(error)])[-1][:300]
            return _with(known, failure=reason, wall=time.perf_counter() - begin)
        finally:
            _restore(kept)
    memory = max(rank.memory.reserved for rank in found.ranks)
    return _with(known, predicted=found.iteration_time / 1e12, memory=memory, wall=time.perf_counter() - begin)


def _with(known: Outcome, **changes: object) -> Outcome:
    return Outcome(**asdict(known) | changes)


def _redirected(target: int) -> tuple[int, int]:
    """What the ranks print is the script's, not ours."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    os.dup2(target, 1)
    os.dup2(target, 2)
    return kept


def _restore(kept: tuple[int, int]) -> None:
    for number, saved in enumerate(kept, 1):
        os.dup2(saved, number)
        os.close(saved)


def simulate_all(rows: Sequence[Row], workers: int, known: dict[str, Outcome], store: Path | None) -> list[Outcome]:
    """All rows, those in ``known`` from there; tells how far it is and how long it will take."""
    left = [row for row in rows if row.id not in known]
    found = [known[row.id] for row in rows if row.id in known]
    begin = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        jobs = {pool.submit(outcome, row): row for row in left}
        for done, job in enumerate(as_completed(jobs), 1):
            one = job.result()
            found.append(one)
            spent = time.perf_counter() - begin
            text = one.failure or f"{one.predicted:.3f} s against {one.measured:.3f} s, {one.error:+.1%}"
            rest = spent / done * (len(left) - done)
            print(
                f"{done:4d}/{len(left)} {one.id:24s} {text}  [{one.wall:.0f} s; {rest / 60:.0f} min left]", flush=True
            )
            if store:
                with store.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(one)) + "\n")
    return sorted(found, key=lambda one: one.id)


def chosen(rows: Sequence[Row], seed: int = 1) -> tuple[list[Row], dict[str, list[str]]]:
    """The rows that a plain run takes, and the names of the others by why not.

    Of a family in `SAMPLED`, in the order of how long a token takes on a GPU, one row of each of so many equal parts.
    """
    taken: list[Row] = []
    left: dict[str, list[str]] = defaultdict(list)
    for family in dict.fromkeys(row.family for row in rows):
        alike = sorted((row for row in rows if row.family == family), key=lambda row: (row.rate, row.id))
        count = SAMPLED.get(family, len(alike))
        sampled = _strata(alike, count, seed)
        for row in alike:
            if row.micro_batches > LONG:
                left[f"more than {LONG:,} micro-batches to execute"].append(row.id)
            elif row not in sampled:
                left[f"{count} of the {len(alike)} rows of {family} stand for all"].append(row.id)
            else:
                taken.append(row)
    return sorted(taken, key=lambda row: row.id), left


def _strata(rows: Sequence[Row], count: int, seed: int) -> set[Row]:
    """One of each of ``count`` equal parts of ``rows``, or all where they are fewer."""
    if len(rows) <= count:
        return set(rows)
    draw = random.Random(seed)
    edges = [round(len(rows) * part / count) for part in range(count + 1)]
    return {rows[draw.randrange(low, high)] for low, high in pairwise(edges)}


def remembered(store: Path | None) -> dict[str, Outcome]:
    """Outcomes of an earlier run that was cut short."""
    if store is None or not store.exists():
        return {}
    lines = store.read_text(encoding="utf-8").splitlines()
    return {one["id"]: Outcome(**one) for one in map(json.loads, lines) if not one["failure"]}


def mean_absolute(values: Sequence[float]) -> float:
    """Mean of absolute values; NaN of none."""
    return statistics.fmean(map(abs, values)) if values else float("nan")


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation."""
    from scipy.stats import spearmanr

    return float(spearmanr(first, second).statistic)


def rankings(found: Sequence[Outcome]) -> dict[str, float]:
    """Rank correlation of the configurations of each model of vTrain's multi-node rows that has three or more."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for one in found:
        if one.family == "vtrain-multi":
            groups[f"{one.model} on {one.ranks}"].append(one)
    return {
        name: spearman([one.predicted or 0 for one in group], [one.measured for one in group])
        for name, group in groups.items()
        if len(group) > 2
    }


def is_fsdp(one: Outcome, rows: dict[str, Row]) -> bool:
    """Whether it is a run of torchtitan that shards parameters and splits nothing else."""
    return one.family == "torchtitan" and not {"--tp", "--cp", "--pp"} & set(rows[one.id].argv)


def families(found: Sequence[Outcome]) -> list[list[str]]:
    """Of each family and GPU: rows, errors' mean, median and largest; the same of memory."""
    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for one in found:
        groups[one.family, one.device].append(one)
    lines = []
    for (family, device), group in sorted(groups.items()):
        errors = [one.error for one in group]
        memory = [one.memory_error for one in group if one.memory_error is not None]
        middle = statistics.median(map(abs, errors))
        line = [f"{family}, {device}", str(len(group)), f"{mean_absolute(errors):.1%}", f"{middle:.1%}"]
        line += [f"{max(errors, key=abs):+.1%}"]
        line += [f"{mean_absolute(memory):.1%}", f"{max(memory, key=abs):+.1%}"] if memory else ["", ""]
        lines.append(line)
    return lines


HEAD = ("family, GPU", "rows", "mean", "median", "largest", "memory, mean", "largest")


def report(found: Sequence[Outcome], rows: dict[str, Row]) -> dict[str, float]:
    """Prints the table of families; returns the keys of the last line."""
    good = [one for one in found if one.predicted is not None]
    print()
    for line in [list(HEAD), *families(good)]:
        print(f"{line[0]:26s}" + "".join(f"{cell:>14s}" for cell in line[1:]))
    failed = [one for one in found if one.failure]
    for one in failed:
        print(f"no forecast of {one.id}: {one.failure}")
    ranks = rankings(good)
    for name, value in sorted(ranks.items()):
        print(f"ranking of configurations of {name}: {value:.3f}")
    fsdp = [one.error for one in good if is_fsdp(one, rows)]
    torchtitan = [one.error for one in good if one.family == "torchtitan"]
    memory = [one.memory_error for one in good if one.family == "torchtitan" and one.memory_error is not None]
    return {
        "torchtitan_error_mean": mean_absolute(fsdp),
        "torchtitan_error_max": max(map(abs, fsdp), default=float("nan")),
        "torchtitan_every_layout_error_mean": mean_absolute(torchtitan),
        "torchtitan_every_layout_error_max": max(map(abs, torchtitan), default=float("nan")),
        "all_error_mean": mean_absolute([one.error for one in good]),
        "spearman_min": min(ranks.values(), default=float("nan")),
        "memory_error_max": max(map(abs, memory), default=float("nan")),
        "failed": float(len(failed)),
    }


ANCHORS = {
    ("H100-HBM2e", "torchtitan"): ("torchtitan-0001", "torchtitan-0006"),
    ("A100", "torchtitan"): ("torchtitan-0036", "torchtitan-0035"),
    ("H200", "torchtitan"): ("torchtitan-0032",),
    ("H100", "fms-fsdp"): ("fmsfsdp-0002", "fmsfsdp-0006"),
    ("A100", "fms-fsdp"): ("fmsfsdp-0005",),
    ("H100", "neusight"): ("neusight-0005", "neusight-0008"),
    ("B200", "megatron"): ("simumax-b200-0009", "simumax-b200-0026"),
}
"""The rows that a stack's factor is fitted on."""


HOST_ANCHORS = {("A100", "megatron-deepspeed"): ("vtrain-single-0256", "vtrain-single-0522")}
"""The rows that a stack's factor of the host is fitted on, in place of that of operators."""


def fit(rows: dict[str, Row], wanted: set[str]) -> None:
    """Prints the factors with which the forecasts of anchors in ``wanted`` are right, by the secant method."""
    for (device, stack), names in ANCHORS.items():
        if not wanted & set(names):
            continue
        found = [_secant(lambda x, row=rows[name]: outcome(row, x).error, 1.0, 1.15) for name in names]
        print(f"{stack}: {device} = {statistics.geometric_mean(found):.3f}  # {', '.join(names)}", flush=True)
    for (device, stack), names in HOST_ANCHORS.items():
        if not wanted & set(names):
            continue
        found = [_secant(lambda x, row=rows[name]: outcome(row, host=x).error, 6.0, 8.0) for name in names]
        print(f"{stack}: host.{device} = {statistics.geometric_mean(found):.2f}  # {', '.join(names)}", flush=True)


def _secant(error: Callable[[float], float], low: float, high: float) -> float:
    """Where ``error``, nearly linear, is 0."""
    at_low, at_high = error(low), error(high)
    return low - at_low * (high - low) / (at_high - at_low)


def write(found: Sequence[Outcome], rows: dict[str, Row], results: dict[str, float]) -> None:
    """The documentation's page and its picture."""
    from foretrain.device import preset
    from foretrain.device.stack import stack_factor

    good = [one for one in found if one.predicted is not None]
    factors = [
        [f"{stack}, {device}", f"{stack_factor(preset(device), stack):.3f}", ", ".join(names)]
        for (device, stack), names in ANCHORS.items()
    ]
    lines = [
        [
            f"{one.id}: {one.model}, {rows[one.id].precision}, {one.ranks} {one.device}",
            f"{one.predicted:.3f} s",
            f"{one.measured:.3f} s",
            f"{one.error:+.1%}",
            "" if one.memory_error is None else f"{one.memory_error:+.1%}",
            "; ".join(rows[one.id].departures),
        ]
        for one in good
        if one.family in ("torchtitan", "fmsfsdp")
    ]
    text = PREFACE.format(
        count=len(good),
        families=table(HEAD, families(good)),
        factors=table(("framework, GPU", "factor", "fitted on"), factors),
        rows=table(("run", "forecast", "measured", "error", "memory", "departures"), lines),
        machine="{date}, {cores} cores of {cpu}".format(**machine()),
        **results,
    )
    PAGE.write_text(text, encoding="utf-8")
    PICTURE.write_text(scatter(good), encoding="utf-8")


def own_options(parser: argparse.ArgumentParser) -> None:
    """--data, --family, --row, --fit, --store, --markdown, --workers."""
    parser.add_argument("--data", type=Path, default=DATA, metavar="CSV")
    parser.add_argument("--family", action="append", help="only rows of this family")
    parser.add_argument("--row", action="append", help="only this row")
    parser.add_argument("--fit", action="store_true", help="fit the stacks' factors anew and print them")
    parser.add_argument("--store", type=Path, help="keep outcomes here, and go on from them after an interruption")
    parser.add_argument("--markdown", action="store_true", help="write the page of the documentation")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)


def main() -> None:
    """Simulates, prints, and writes JSON if asked."""
    arguments = options(__doc__, own_options)
    rows, left = read(arguments.data)
    if arguments.fit:
        known = {row.id: row for row in rows}
        fit(known, {row.id for row in rows if not arguments.family or row.family in arguments.family})
        return
    if arguments.quick:
        rows = [row for row in rows if row.id in QUICK]
    elif arguments.row:
        rows = [row for row in rows if row.id in arguments.row]
    elif arguments.family:
        rows = [row for row in rows if row.family in arguments.family]
    if not (arguments.full or arguments.quick or arguments.row):
        rows, others = chosen(rows)
        for reason, names in others.items():
            shown = ", ".join(names) if len(names) < 10 else f"{len(names)} rows"
            print(f"left out unless --full: {shown}: {reason}")
    print(f"{len(rows)} rows; {len(left)} more cannot be repeated by a script here (accuracy/rows.py lists them)")
    found = simulate_all(rows, arguments.workers, remembered(arguments.store), arguments.store)
    known = {row.id: row for row in rows}
    results = report(found, known)
    if arguments.markdown:
        write(found, known, results)
    finish(arguments, "accuracy", results, [asdict(one) for one in found])


if __name__ == "__main__":
    main()
