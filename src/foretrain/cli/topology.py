"""Networks alone: ``foretrain topology``, ``foretrain collective`` and ``foretrain share``."""

from __future__ import annotations

import dataclasses
import re
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from foretrain.cli.arguments import (
    DEFAULT_FIDELITY,
    PREPARING,
    AlgorithmText,
    FidelityOptions,
    Folder,
    JsonFile,
    SizeText,
    WorkloadOnCluster,
    check_writable,
    command_line,
    patience,
    write_outputs,
    write_status,
)
from foretrain.cli.progress import percent_bar
from foretrain.errors import ConfigError
from foretrain.files import stdout_console, write_json

if TYPE_CHECKING:
    from foretrain.simulation.shared_network import Tenant

HELP = "Show a network as text, picture or file, or list known ones."


def show(
    topology: Annotated[str, tyro.conf.arg(metavar="TOPOLOGY")],
    /,
    *,
    html: Path | None = None,
    json: JsonFile = None,
    save: Path | None = None,
) -> None:
    """Show a topology: counts, rates, diameter, bisection bandwidth, oversubscription, faults.

    Args:
        topology: e.g. fat_tree:8@100Gbps, bigraph:8x4,server=eflops, dgx-h100:16, or a .toml or .graphml file.
        html: write an interactive picture.
        json: write the numbers; rates in bytes per second, times in seconds.
        save: write every node and link, as .toml or .graphml, to edit and read again.
    """
    from foretrain.network.deployment_notation import topology as read
    from foretrain.network.topology.file import check_format
    from foretrain.network.topology.file import save as save_topology
    from foretrain.report.topology import numbers, page, summary

    check_writable(html=html, json=json, save=save)
    if save:
        check_format(save)
    made = read(topology)
    console = stdout_console(markup=False)
    console.print(summary(made))
    write_outputs(
        console,
        (html, lambda path: page(made, path, command=command_line())),
        (json, lambda path: write_json(path, numbers(made))),
        (save, lambda path: save_topology(made, path)),
    )


def list_(*, json: JsonFile = None) -> None:
    """List the fabrics and servers known by name, and how to write them.

    Args:
        json: write the names.
    """
    from rich.table import Table

    from foretrain.network.fabrics import FABRICS
    from foretrain.network.servers import SERVERS, preset
    from foretrain.units import format_rate

    fabrics, servers = (Table(box=None, pad_edge=False, title=title, title_justify="left") for title in _TITLES)
    check_writable(json=json)
    for table, columns in ((fabrics, ("fabric", "write", "options")), (servers, ("server", "GPUs", "NICs", "each"))):
        for column in columns:
            table.add_column(column, overflow="fold")  # in a narrow terminal nothing is cut off
    for name, fabric in FABRICS.items():
        fabrics.add_row(name, fabric.example, "\n".join(fabric.options))
    for name in SERVERS[1:]:
        server = preset(name)
        port = "" if server.port is None else format_rate(server.port)
        servers.add_row(name, str(server.gpus), str(server.nics), port)
    console = stdout_console(markup=False)
    console.print(fabrics, "", servers, sep="\n")
    known = {
        "fabrics": [
            {"name": name, "example": one.example, "options": list(one.options)} for name, one in FABRICS.items()
        ],
        "servers": [
            {"name": name, "gpus": one.gpus, "nics": one.nics, "port": one.port}
            for name, one in ((name, preset(name)) for name in SERVERS[1:])
        ],
    }
    write_outputs(console, (json, lambda path: write_json(path, known)))


_TITLES = ("FABRIC:SHAPE[@RATE][,OPTION=...], all with latency=T and server=NAME:", "SERVER:COUNT, rail-optimised:")


def collective(
    network: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TOPOLOGY")],
    *,
    operation: Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"] = "all_reduce",
    size: SizeText = "100MB",
    collectives: tuple[AlgorithmText, ...] | None = None,
    html: Path | None = None,
    json: JsonFile = None,
    details: Folder | None = None,
    fidelity: tyro.conf.OmitArgPrefixes[FidelityOptions] = DEFAULT_FIDELITY,
) -> None:
    """Simulate one collective by every suitable algorithm.

    Says of each the time, the bus bandwidth and the busiest link.

    Args:
        network: a topology, e.g. bigraph:8x4@100Gbps or fat_tree:8@100Gbps,routing=spray.
        operation: the collective operation.
        size: size as nccl-tests count it: of the gradient, of all shards together, or of all that one rank sends.
        collectives: algorithms; by default all that suit the network.
        html: write a page of the network, coloured by the utilisation of each link under the fastest algorithm.
        json: write the numbers.
        details: with --network packet, a folder for flows.csv, ports.csv and queues.csv of the fastest algorithm: times
            of flows; packets that each port and class sent, marked, dropped and lost; queue lengths over time.
        fidelity: fidelity of the network.
    """
    from foretrain.network.collective_benchmark import exchange
    from foretrain.network.collective_placement import suited
    from foretrain.network.deployment_notation import deployment
    from foretrain.network.fidelity import decided, packet_hops, parts
    from foretrain.report.collective_table import caption, numbers, packet_table, table, write_packets
    from foretrain.report.topology import page
    from foretrain.units import parse_size

    check_writable(html=html, json=json)
    data = parse_size(size, "size")
    if data < 1:
        raise ConfigError("size", size, "is not a positive size", "write e.g. 100MB")
    network_fidelity = fidelity.read()
    with patience(PREPARING):
        place = deployment(network).simulated(network_fidelity)
        names = collectives or tuple(suited(operation, place.topology, place.members))
        programs = [place.program(operation, data, collective=name) for name in names]
        made = decided(network_fidelity, place.network, programs)
    if network_fidelity.level in ("packet", "auto"):
        write_status(made.why)
    if details and made.fidelity.level != "packet":
        raise ConfigError("details", str(details), "needs packets", "add --network packet, or leave it out")
    place = place.simulated(made.fidelity)
    hops = [packet_hops(program, network_fidelity.transport.payload) for program in programs]
    waits = nullcontext() if network_fidelity.level in ("packet", "auto") else patience(PREPARING)
    with waits, percent_bar(str(made.fidelity)) as bar:
        told = zip(names, parts(hops, bar), strict=True)
        found = sorted((exchange(place, operation, data, *each) for each in told), key=lambda one: one.time)
    console = stdout_console()
    console.print(table(found))
    console.print(caption(found[0]), style="dim", soft_wrap=True)
    if made.fidelity.level == "packet":
        console.print(packet_table(found))
    write_outputs(
        console,
        (html, lambda path: page(found[0].topology, path, found, command_line())),
        (json, lambda path: write_json(path, numbers(found))),
    )
    if details:
        with percent_bar("details") as bar:
            written = write_packets(found[0], place, details, bar)
        for path in written:
            console.print(f"wrote {path}", markup=False, soft_wrap=True)


_WARM = 2
"""Iterations before the measured ones, as most policies need."""
_JOB = re.compile(r"(?P<workload>[^@]+)@(?P<ranks>[0-9+\- ]+)(?::(?P<schedule>.+))?")


def share(
    network: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TOPOLOGY")],
    jobs: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="JOB [JOB ...]", help_behavior_hint="(required)")
    ],
    *,
    steps: int = 4,
    batch: int | None = None,
    trace: Path | None = None,
    json: JsonFile = None,
    fidelity: tyro.conf.OmitArgPrefixes[FidelityOptions] = DEFAULT_FIDELITY,
) -> None:
    """Simulate jobs that share a network: how much slower is each?

    Args:
        network: a topology, e.g. leaf_spine:4x8@25Gbps,oversubscription=4,collective=ring.
        jobs: WORKLOAD@RANKS[:SCHEDULE], e.g. resnet50@0-7+16-23 "vgg16@8-15:prophet".
        steps: measured iterations of each job, after its warm-up.
        batch: samples per GPU of models of the zoo.
        trace: write a trace for ui.perfetto.dev (.json for Chrome's format).
        json: write the numbers.
        fidelity: fidelity of the network.
    """
    from rich.table import Table

    from foretrain.report.trace import write_trace
    from foretrain.simulation.shared_network import alone, together
    from foretrain.units import format_time

    check_writable(trace=trace, json=json)
    tenants = [_tenant(network, job, batch) for job in jobs]
    tenants = _simulated(tenants, steps, fidelity)
    with percent_bar("together") as progress:
        runs = together(tenants, steps=steps, trace=trace is not None, progress=progress)
    table = Table(box=None, pad_edge=False)
    for column in ("job", "schedule", "alone", "together", "slowdown", "T* alone"):
        table.add_column(column, justify="left" if column in ("job", "schedule") else "right")
    rows = []
    for job, tenant, run in zip(jobs, tenants, runs, strict=True):
        with percent_bar(f"{job} alone") as progress:
            single = alone(tenant, steps=steps, progress=progress).iteration_time
        ratio = run.iteration_time / single
        times = (format_time(time) for time in (single, run.iteration_time))
        table.add_row(job, str(run.schedule), *times, f"{ratio:.2f}×", format_time(run.bound.time))
        rows.append(run.to_dict() | {"job": job, "alone": single / 1e12, "slowdown": ratio})
    console = stdout_console()
    console.print(table)
    console.print("no ±: a ratio of two simulations; nothing was measured", style="dim", soft_wrap=True)
    write_outputs(console, (trace, lambda path: write_trace(runs, path)), (json, lambda path: write_json(path, rows)))


def _simulated(tenants: list[Tenant], steps: int, fidelity: FidelityOptions) -> list[Tenant]:
    """Return ``tenants`` in a network of this ``fidelity``; write the estimated effort on stderr."""
    from foretrain.network.fidelity import decided

    network_fidelity = fidelity.read()
    # Each job runs twice, together and alone, and known next collectives are simulated ahead.
    times = 4 * (steps + _WARM)
    places = [one.where.simulated(network_fidelity) for one in tenants]
    exchanged = [place.program("all_reduce", one.workload.size) for place, one in zip(places, tenants, strict=True)]
    made = decided(network_fidelity, places[0].network, exchanged, times)
    if network_fidelity.level in ("packet", "auto"):
        write_status(made.why)
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


COMMANDS = {"show": show, "list": list_}
"""Subcommands of ``foretrain topology`` by name."""
