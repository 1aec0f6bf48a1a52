"""``foretrain compare``: every schedule on one workload."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import tyro

from foretrain.cli.arguments import WorkloadOnCluster, check_writable, split
from foretrain.cli.network_options import Closely, placed
from foretrain.cli.progress import progress_bar

_USUALLY = Closely()


def compare(
    scenario: tyro.conf.OmitArgPrefixes[WorkloadOnCluster],
    *,
    schedules: tuple[str, ...] = (),
    tune: bool = True,
    sweep: str | None = None,
    points: int = 9,
    html: Path | None = None,
    trace: Path | None = None,
    json: Path | None = None,
    closely: tyro.conf.OmitArgPrefixes[Closely] = _USUALLY,
) -> None:
    """Every schedule on one workload: time, speed-up, distance to the optimum, and whether it is worth it.

    Args:
        scenario: the workload and the cluster.
        schedules: which, e.g. ddp "bytescheduler(partition=1MB)"; auto, what the planner chooses; or a plan file;
            all policies when none is named.
        tune: search each schedule's free knobs for their best.
        sweep: repeat over a range, e.g. rate=1Gbps:100Gbps; also latency, overhead, workers.
        points: how many points the sweep has.
        html: write an interactive page.
        trace: write a trace for ui.perfetto.dev (.json for Chrome's format).
        json: write the numbers.
        closely: how closely the network of a topology is simulated.
    """
    from rich.console import Console

    from foretrain.experiments import compare as compare_all
    from foretrain.experiments import sweep as sweep_all
    from foretrain.experiments.comparison import ALL_SCHEDULES
    from foretrain.report.table import summary

    check_writable(html=html, trace=trace, json=json)
    workload, place = scenario.read()
    place = placed(place, workload.size, closely)
    names = tuple(name for text in schedules for name in split(text)) or ALL_SCHEDULES
    keep = html is not None or trace is not None
    with progress_bar("comparing") as progress:
        table = compare_all(workload, place, names, tuned=tune, trace=keep, progress=progress)
    if sweep:
        with progress_bar("sweeping") as progress:
            rows = sweep_all(workload, place, names, sweep, points=points, tuned=tune, progress=progress)
        table = table.with_sweep(rows)
    console = Console(highlight=False)
    console.print(summary(table))
    for path in _write(table, html, trace, json):
        console.print(f"wrote {path}", markup=False, soft_wrap=True)


def _write(table: object, html: Path | None, trace: Path | None, json: Path | None) -> Iterator[Path]:
    import msgspec

    from foretrain.experiments import Comparison
    from foretrain.files import write_atomically

    assert isinstance(table, Comparison)
    if html:
        from foretrain.report.page import page

        page(table, html)
        yield html
    if trace:
        from foretrain.report.trace import write_trace

        write_trace(table.runs, trace)
        yield trace
    if json:
        write_atomically(json, msgspec.json.format(msgspec.json.encode(table.to_dict()), indent=2))
        yield json
