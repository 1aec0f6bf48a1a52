"""``foretrain share``: several jobs in one network."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from foretrain.cli.arguments import WorkloadOnCluster, check_writable
from foretrain.cli.network_options import Closely, progress_bar, say
from foretrain.errors import ConfigError

if TYPE_CHECKING:
    from foretrain.simulation.shared_network import Tenant

_USUALLY = Closely()
_WARM = 2
"""Iterations before those that are measured, as most policies need."""
_JOB = re.compile(r"(?P<workload>[^@]+)@(?P<ranks>[0-9+\- ]+)(?::(?P<schedule>.+))?")


def share(
    network: Annotated[str, tyro.conf.Positional],
    jobs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="JOB")],
    *,
    steps: int = 4,
    batch: int | None = None,
    trace: Path | None = None,
    json: Path | None = None,
    closely: tyro.conf.OmitArgPrefixes[Closely] = _USUALLY,
) -> None:
    """Jobs that share a network, flow by flow: how much each loses to the others.

    Args:
        network: a topology, e.g. leaf_spine:4x8@25Gbps,oversubscription=4,collective=ring.
        jobs: WORKLOAD@RANKS[:SCHEDULE], e.g. resnet50@0-7+16-23 "vgg16@8-15:prophet".
        steps: iterations of each job to measure, after its warm-up.
        batch: samples per GPU of models of the zoo.
        trace: write a trace for ui.perfetto.dev (.json for Chrome's format).
        json: write the numbers.
        closely: how closely the network is simulated.
    """
    import msgspec
    from rich.console import Console
    from rich.table import Table

    from foretrain.files import write_atomically
    from foretrain.report.trace import write_trace
    from foretrain.simulation.shared_network import alone, together
    from foretrain.units import format_time

    check_writable(trace=trace, json=json)
    tenants = [_tenant(network, job, batch) for job in jobs]
    tenants = _simulated(tenants, steps, closely)
    with progress_bar("together") as progress:
        runs = together(tenants, steps=steps, trace=trace is not None, progress=progress)
    table = Table(box=None, pad_edge=False)
    for column in ("job", "schedule", "alone", "together", "slowdown", "T* alone"):
        table.add_column(column, justify="left" if column in ("job", "schedule") else "right")
    rows = []
    for job, tenant, run in zip(jobs, tenants, runs, strict=True):
        with progress_bar(f"{job} alone") as progress:
            single = alone(tenant, steps=steps, progress=progress).iteration_time
        ratio = run.iteration_time / single
        times = (format_time(time) for time in (single, run.iteration_time))
        table.add_row(job, str(run.schedule), *times, f"{ratio:.2f}×", format_time(run.bound.time))
        rows.append(run.to_dict() | {"job": job, "alone": single / 1e12, "slowdown": ratio})
    console = Console(highlight=False)
    console.print(table)
    if trace:
        write_trace(runs, trace)
    if json:
        write_atomically(json, msgspec.json.format(msgspec.json.encode(rows), indent=2))
    for path in filter(None, (trace, json)):
        console.print(f"wrote {path}", markup=False, soft_wrap=True)


def _simulated(tenants: list[Tenant], steps: int, closely: Closely) -> list[Tenant]:
    """``tenants`` in a network that is simulated so closely; says what that takes."""
    from foretrain.network.fidelity import decided

    fidelity = closely.read()
    # Each runs twice, together and alone, and what is known to come next is simulated ahead.
    times = 4 * (steps + _WARM)
    places = [one.where.simulated(fidelity) for one in tenants]
    exchanged = [place.program("all_reduce", one.workload.size) for place, one in zip(places, tenants, strict=True)]
    made = decided(fidelity, places[0].network, exchanged, times)
    if fidelity.level in ("packet", "auto"):
        say(made.why)
    return [dataclasses.replace(one, where=one.where.simulated(made.fidelity)) for one in tenants]


def _tenant(network: str, text: str, batch: int | None) -> Tenant:
    from foretrain.network import Cluster
    from foretrain.simulation.shared_network import Tenant

    match = _JOB.fullmatch(text)
    if match is None:
        raise ConfigError("job", text, "is not WORKLOAD@RANKS", "write e.g. resnet50@0-7 or 'vgg16@8-15:prophet'")
    workload, place = WorkloadOnCluster(match["workload"], f"{network},ranks={match['ranks']}", batch=batch).read()
    if isinstance(place, Cluster):
        raise ConfigError("network", network, "has no topology to share", "write e.g. leaf_spine:4x8@25Gbps")
    return Tenant(workload, place, match["schedule"] or "bytescheduler")
