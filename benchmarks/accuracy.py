"""Forecasts of published training runs against what was measured.

Each row of accuracy/groundtruth-train.csv that a plain PyTorch script can repeat (accuracy/rows.py) is simulated as
`foretrain simulate` would: the script unmodified, on the row's GPUs and network, all ranks of a kind folded. Nothing is
timed here; what is compared is the time of an iteration and the peak of memory, reserved or allocated, as published.

One constant is fitted for each pair of GPU and framework, on one or two rows each: that by which all operators' times
are multiplied (`ANCHORS`), or where published runs are bound by the host, that by which its launches are
(`HOST_ANCHORS`). foretrain/device/stacks.toml has the outcome. Everything else is what any simulation uses.

Outcomes are kept in benchmarks/data/accuracy.jsonl; accuracy/kept.py decides whether the code they depend on is what it
was. Reports are of all kept outcomes, and only what is stale or asked for is simulated.

    python benchmarks/accuracy.py                      reports, after simulating what is stale
    python benchmarks/accuracy.py --quick              reports, after simulating at most three witnesses
    python benchmarks/accuracy.py --full --minutes 60  also rows that were never simulated, cheapest first, for an hour
    python benchmarks/accuracy.py --row NAME           simulates this row again
    python benchmarks/accuracy.py --fit                fits the constants anew, from their rows
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path

from measure import finish, options

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "accuracy"))

import kept  # noqa: E402, its folder is no package
from factors import fit  # noqa: E402
from page import write  # noqa: E402
from row_outcome import Outcome, outcome  # noqa: E402
from rows import DATA, Row, contributed, read  # noqa: E402
from summary import report  # noqa: E402

WITNESSES = 3
"""How many groups --quick checks."""


def simulate_all(
    rows: Sequence[Row], workers: int, seconds: float = math.inf, keep: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """Simulates rows in order, beginning none after so many seconds, and tells how far it is and how long it will take.

    ``keep`` gets each outcome as it comes.
    """
    found: list[Outcome] = []
    begin = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        left, running = list(rows), dict[Future[Outcome], Row]()
        while left or running:
            while left and len(running) < workers and time.perf_counter() - begin < seconds:
                row = left.pop(0)
                running[pool.submit(outcome, row)] = row
            if not running:
                break
            for job in wait(running, return_when=FIRST_COMPLETED).done:
                one = kept.stamped(running.pop(job), job.result())
                found.append(one)
                keep(one)
                rest = (time.perf_counter() - begin) / len(found) * (len(rows) - len(found)) / 60
                text = one.failure or f"{one.predicted:.3f} s against {one.measured:.3f} s, {one.error:+.1%}"
                told = f"{len(found):4d}/{len(rows)} {one.id:24s} {text}"
                print(f"{told}  [{one.wall:.0f} s; {rest:.0f} min left]", flush=True)
    return sorted(found, key=lambda one: one.id)


def own_options(parser: argparse.ArgumentParser) -> None:
    """--data, --kept, --family, --row, --fit, --minutes, --markdown, --workers."""
    parser.add_argument("--data", type=Path, default=DATA, metavar="CSV")
    parser.add_argument("--kept", type=Path, default=kept.KEPT, metavar="JSONL", help="the file of kept outcomes")
    parser.add_argument("--family", action="append", help="only rows of this family")
    parser.add_argument("--row", action="append", help="simulate this row again")
    parser.add_argument("--fit", action="store_true", help="fit the stacks' factors anew and print them")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no simulation after so many")
    parser.add_argument("--markdown", action="store_true", help="write the page of the documentation")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)


def simulated(arguments: argparse.Namespace, rows: Sequence[Row]) -> tuple[dict[str, Outcome], list[str]]:
    """The outcomes of ``rows`` that hold, after simulating what is to be, and the names of rows that are stale."""
    stored = kept.load(arguments.kept)

    def keep(*ones: Outcome) -> None:
        before = dict(stored)
        stored.update(
            {one.id: one for one in ones if not one.failure or one.id not in before or before[one.id].failure}
        )
        if stored != before:
            kept.save(stored, arguments.kept)

    def witness(some: Sequence[Row]) -> list[Outcome]:
        if some:
            print(f"code has changed: {len(some)} witnesses are simulated again")
        return simulate_all(some, arguments.workers, seconds)

    seconds = 60 * arguments.minutes
    limit = 0 if arguments.row or arguments.minutes == 0 else WITNESSES if arguments.quick else None
    found, changed, unchecked = kept.check(rows, stored, witness, limit)
    for group in changed:
        print(f"{group}: comes out differently, so its outcomes are stale")
    for group in unchecked:
        print(f"{group}: code has changed since, and whether outcomes have was not checked")
    keep(*found.values())
    if arguments.row:
        wanted = [row for row in rows if row.id in arguments.row]
    elif arguments.full:
        wanted = [row for row in rows if row.id not in found or not found[row.id].exact]
    else:
        wanted = [row for row in rows if row.id in stored and row.id not in found]
    wanted = [] if arguments.quick else sorted(wanted, key=lambda row: (row.effort, row.id))
    alike: dict[str, list[Row]] = {}
    for row in wanted:
        alike.setdefault(kept.command_digest(row), []).append(row)

    def share(one: Outcome) -> None:
        shared = [kept.given_to(row, one) for row in alike.pop(one.command)]
        found.update({each.id: each for each in shared})
        keep(*shared)

    if not arguments.row:
        for one in [one for one in found.values() if one.exact and not one.failure]:
            if one.command in alike:
                share(one)
    simulate_all([some[0] for some in alike.values()], arguments.workers, seconds, share)
    return found, [row.id for row in rows if row.id in stored and row.id not in found]


def main() -> None:
    """Simulates, prints, and writes JSON if asked."""
    arguments = options(__doc__, own_options, full="also rows that were never simulated")
    rows, left = ([*published, *ours] for published, ours in zip(read(arguments.data), contributed(), strict=True))
    known = {row.id: row for row in rows}
    if arguments.fit:
        fit(known, {row.id for row in rows if not arguments.family or row.family in arguments.family})
        return
    rows = [row for row in rows if not arguments.family or row.family in arguments.family]
    now, stale = simulated(arguments, rows)
    never = len(rows) - len(now) - len(stale)
    print(f"{len(rows)} rows: {len(now)} outcomes, {len(stale)} stale, {never} never simulated; "
          f"{len(left)} more cannot be repeated by a script here (accuracy/rows.py lists them)")  # fmt: skip
    found = list(now.values())
    print(f"{kept.checked(found, known)} of {len(found)} outcomes were checked with this code")
    results = report(found, known)
    if arguments.markdown:
        write(found, known, results)
    finish(arguments, "accuracy", results, [asdict(one) for one in found])


if __name__ == "__main__":
    main()
