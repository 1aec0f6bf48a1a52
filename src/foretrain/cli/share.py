"""``foretrain share``: several jobs in one network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from foretrain.cli.arguments import Scenario, check_writable
from foretrain.errors import ConfigError

if TYPE_CHECKING:
    from foretrain.virtual.together import Tenant

_JOB = re.compile(r"(?P<workload>[^@]+)@(?P<ranks>[0-9+\- ]+)(?::(?P<schedule>.+))?")


def share(
    network: Annotated[str, tyro.conf.Positional],
    jobs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="JOB")],
    *,
    steps: int = 4,
    batch: int | None = None,
    trace: Path | None = None,
    json: Path | None = None,
) -> None:
    """Jobs that share a network, flow by flow: how much each loses to the others.

    Args:
        network: a topology, e.g. leaf_spine:4x8@25Gbps,oversubscription=4,collective=ring.
        jobs: WORKLOAD@RANKS[:SCHEDULE], e.g. resnet50@0-7+16-23 "vgg16@8-15:prophet".
        steps: iterations of each job to measure, after its warm-up.
        batch: samples per GPU of models of the zoo.
        trace: write a trace for ui.perfetto.dev (.json for Chrome's format).
        json: write the numbers.
    """
    import msgspec
    from rich.console import Console
    from rich.table import Table

    from foretrain.files import write_atomically
    from foretrain.report.trace import write_trace
    from foretrain.units import format_time
    from foretrain.virtual.together import alone, together

    check_writable(trace=trace, json=json)
    tenants = [_tenant(network, job, batch) for job in jobs]
    runs = together(tenants, steps=steps, trace=trace is not None)
    table = Table(box=None, pad_edge=False)
    for column in ("job", "schedule", "alone", "together", "slowdown", "T* alone"):
        table.add_column(column, justify="left" if column in ("job", "schedule") else "right")
    rows = []
    for job, tenant, run in zip(jobs, tenants, runs, strict=True):
        single = alone(tenant, steps=steps).iteration_time
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
        console.print(f"wrote {path}", markup=False)


def _tenant(network: str, text: str, batch: int | None) -> Tenant:
    from foretrain.network import Cluster
    from foretrain.virtual.together import Tenant

    match = _JOB.fullmatch(text)
    if match is None:
        raise ConfigError("job", text, "is not WORKLOAD@RANKS", "write e.g. resnet50@0-7 or 'vgg16@8-15:prophet'")
    workload, place = Scenario(match["workload"], f"{network},ranks={match['ranks']}", batch=batch).read()
    if isinstance(place, Cluster):
        raise ConfigError("network", network, "has no topology to share", "write e.g. leaf_spine:4x8@25Gbps")
    return Tenant(workload, place, match["schedule"] or "bytescheduler")
