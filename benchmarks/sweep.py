"""What a sweep costs: scenarios per second with one worker and with two, and how long 10,000 take.

The sweep is ResNet-50 on 4x8xV100 over rates from 1 to 100 Gb/s, under eight policies with their knobs, through the
same functions as ``foretrain sweep``. What counts is from the first batch to the Parquet file, without starting Python
and the workers, which is told apart. ``--full`` runs 10,000 scenarios with two workers; ``--quick`` runs fewer and says
what 10,000 would take at that pace.

The baseline, in the same run, is the bare loop: the same scenarios simulated by one process, one after the other, with
nothing written, handed out or remembered between them but the workload.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage

from measure import finish, options

from foretrain.experiments import ResultStore, Scenario, ScenarioResult, expand, parse, run
from foretrain.experiments.result_table import table
from foretrain.network import cluster
from foretrain.simulation import simulate
from foretrain.workload import zoo

SWEEP = """
workloads = ["resnet50"]
[[clusters]]
notation = "4x8xV100@{{rate}}"
axes = {{ rate = {{ from = "1Gbps", to = "100Gbps", points = {points} }} }}
[[schedules]]
notation = ["fifo", "ddp", "fusion", "mgwfbp", "dear"]
[[schedules]]
notation = "ddp"
knobs = {{ bucket = ["1MB", "2MB", "5MB", "10MB", "50MB"] }}
[[schedules]]
notation = "p3"
knobs = {{ slice = ["1MB", "2MB", "4MB", "8MB"] }}
[[schedules]]
notation = "prophet"
knobs = {{ partition = ["1MB", "4MB"] }}
[[schedules]]
notation = "bytescheduler"
knobs = {{ partition = ["500kB", "1MB", "2MB", "4MB"], credit = {{ from = "4MB", to = "64MB", points = 6 }} }}
"""
SCHEDULES = 40
TARGET = 10_000


def scenarios(points: int) -> tuple[Scenario, ...]:
    """`SCHEDULES` for each of ``points`` rates."""
    made = tuple(expand(parse(SWEEP.format(points=points))).scenarios.values())
    assert len(made) == points * SCHEDULES, len(made)
    return made


@dataclass(frozen=True, slots=True)
class Timed:
    """One sweep.

    Attributes:
        start: seconds until the first results were there.
        rate: scenarios per second from then on.
        parent: CPU seconds of a scenario in the process that hands out and writes; with one worker it is that, too.
        workers: CPU seconds of a scenario in the others, their start included.
    """

    start: float
    rate: float
    parent: float
    workers: float


def timed(todo: tuple[Scenario, ...], jobs: int) -> Timed:
    """Simulates ``todo`` and writes the Parquet file."""
    arrivals: list[tuple[float, int]] = []
    cpu = [_cpu(who) for who in (RUSAGE_SELF, RUSAGE_CHILDREN)]
    with tempfile.TemporaryDirectory() as folder, ResultStore(Path(folder) / "journal", ScenarioResult) as journal:
        began = time.perf_counter()
        run(todo, journal, jobs=jobs, progress=lambda done, total: arrivals.append((time.perf_counter(), done)))
        table({one.id: one for one in todo}, journal.found).write(Path(folder) / "all.parquet")
        ended = time.perf_counter()
    first, early = next((when, done) for when, done in arrivals if done)
    parent, workers = (
        (_cpu(who) - before) / len(todo) for who, before in zip((RUSAGE_SELF, RUSAGE_CHILDREN), cpu, strict=True)
    )
    return Timed(first - began, (len(todo) - early) / (ended - first), parent, workers)


def _cpu(who: int) -> float:
    used = getrusage(who)
    return used.ru_utime + used.ru_stime


def bare(todo: tuple[Scenario, ...]) -> float:
    """Simulations per second of the loop that anyone would write; it has no baseline to tune."""
    work = zoo("resnet50")
    began = time.perf_counter()
    for one in todo:
        simulate(work, cluster(one.where.notation), one.schedule, trace=False)
    return len(todo) / (time.perf_counter() - began)


def main() -> None:
    """Prints rates and the RESULT line."""
    arguments = options(__doc__ or "")
    few = scenarios(12 if arguments.quick else 50)
    loop = bare(few)
    one, two = timed(few, 1), timed(few, 2)
    print(f"{len(few):,} scenarios on {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"bare loop    {loop:8.1f} /s")
    print(f"1 worker     {one.rate:8.1f} /s   {one.rate / loop:.2f} × the loop")
    print(f"2 workers    {two.rate:8.1f} /s   {two.rate / one.rate:.2f} × one worker; started in {two.start:.1f} s")
    print(f"CPU of a scenario: {two.workers * 1e3:.2f} ms in 2 workers, {two.parent * 1e3:.2f} ms in who feeds them,")
    print(f"who could so feed {two.workers / two.parent:.0f} of them")
    if arguments.quick:
        seconds, how = two.start + TARGET / two.rate, "extrapolated"
    else:
        began = time.perf_counter()
        timed(scenarios(TARGET // SCHEDULES), 2)
        seconds, how = time.perf_counter() - began, "measured, expansion and Parquet file included"
    print(f"10,000 scenarios with 2 workers: {seconds:.0f} s ({how})")
    values = {
        "loop_per_s": loop,
        "one_worker_per_s": one.rate,
        "two_workers_per_s": two.rate,
        "scaling": two.rate / one.rate,
        "workers_fed": two.workers / two.parent,
        "seconds_10000": seconds,
        "measured": float(not arguments.quick),
    }
    finish(arguments, "sweep", values)


if __name__ == "__main__":
    main()
