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
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from measure import finish, options

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "accuracy"))

from factors import fit  # noqa: E402, its folder is no package
from outcome import Outcome, outcome  # noqa: E402
from page import write  # noqa: E402
from rows import DATA, Row, read  # noqa: E402
from summary import report  # noqa: E402

SAMPLED = {"vtrain-single": 60}
"""Of large families, how many rows to take unless all are asked for."""

LONG = 2500
"""Micro-batches that a simulation may execute, over all of its live ranks, to be taken unless all are asked for; about
five minutes on a machine with 2 cores."""

QUICK = ("torchtitan-0001", "torchtitan-0036", "llmfoundry-0089")


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
