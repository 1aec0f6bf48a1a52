"""Tables of collectives on one network, and of their packets; files of flows, ports and queues."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from foretrain.files import write_atomically
from foretrain.network.collective_benchmark import CollectiveBenchmark
from foretrain.network.deployment import Deployment
from foretrain.network.packet import Outcome
from foretrain.network.program import Program
from foretrain.network.topology.graph import Topology
from foretrain.units import format_size, format_time, to_seconds

if TYPE_CHECKING:
    from rich.table import Table


HEADS: Final = ("collective", "time", "bus bandwidth", "× ports", "busiest link", "used")
"""Columns of `rows`."""


NOT_MEASURED: Final = "no ±: computed from the given rates and latencies; nothing was measured"
"""Text on uncertainty where none is known."""


def title(first: CollectiveBenchmark) -> str:
    """Return what was simulated, and where."""
    return f"{first.operation} of {format_size(first.size)} among {first.ranks} ranks of {first.topology.name}"


def rows(found: Sequence[CollectiveBenchmark]) -> list[tuple[str, ...]]:
    """Return the columns of `HEADS` of each, as text."""
    told = []
    for one in found:
        source, target, used = one.busiest
        ratio, rate = f"{one.time / one.least:.2f}", f"{one.bandwidth / 1e9:.3g} GB/s"
        told.append((one.name, format_time(one.time), rate, ratio, f"{source} → {target}", f"{used:.0%}"))
    return told


def table(found: Sequence[CollectiveBenchmark]) -> Table:
    """A row for each, in the order given."""
    from rich.table import Table

    first = found[0]
    made = Table(box=None, pad_edge=False, title=title(first), title_justify="left")
    for name in HEADS:
        made.add_column(name, justify="left" if name in ("collective", "busiest link") else "right")
    for row in rows(found):
        made.add_row(*row)
    return made


def caption(first: CollectiveBenchmark) -> str:
    """Return what stands below the table. Not a part of it, which would break lines at its own width."""
    return f"ports: what the slowest port must carry at the least takes {format_time(first.least)}\n{NOT_MEASURED}"


def numbers(found: Sequence[CollectiveBenchmark]) -> list[dict[str, Any]]:
    """Plain numbers, times in seconds, rates in bytes per second."""
    return [
        {
            "collective": one.name,
            "operation": one.operation,
            "size": one.size,
            "ranks": one.ranks,
            "topology": one.topology.name,
            "time": to_seconds(one.time),
            "least": to_seconds(one.least),
            "bus_bandwidth": one.bandwidth,
            "busiest": {"source": one.busiest[0], "target": one.busiest[1], "used": one.busiest[2]},
            **({} if one.outcome is None else {"packets": packet_numbers(one.outcome)}),
        }
        for one in found
    ]


_WATCHED: Final = 16
_SAMPLES: Final = 1000
_TIMES: Final = ("begun", "finish", "completion")
_SENT: Final = ("sent", "repeated", "timeouts")
_COUNTS: Final = ("packets", "bytes", "drops", "dropped_bytes", "marks", "deepest", "losses", "cuts")


def packet_table(found: Sequence[CollectiveBenchmark]) -> Table:
    """A row for each exchange that was simulated packet by packet."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, title="packets", title_justify="left", caption_justify="left")
    made.caption = "time of a flow: mean, 99 %, longest; packets sent again, marked, dropped, lost; deepest queue"
    made.add_column("collective")
    for name in ("mean", "99 %", "longest", "again", "marks", "drops", "lost", "queue"):
        made.add_column(name, justify="right")
    for one in found:
        if (outcome := one.outcome) is not None:
            times, ports = outcome.completions, outcome.ports
            made.add_row(
                one.name,
                *(format_time(round(time)) for time in (times.mean, times.p99, times.largest)),
                *(f"{int(count):,d}" for count in (outcome.repeated.sum(), ports.marks.sum())),
                *(f"{count:,d}" for count in (outcome.drops, outcome.losses)),
                format_size(int(ports.deepest.max(initial=0))),
            )
    return made


def packet_numbers(outcome: Outcome) -> dict[str, Any]:
    """Plain numbers: flow completion times in seconds, packets, bytes."""
    times = outcome.completions
    quantiles = {name: to_seconds(getattr(times, name)) for name in ("median", "p95", "p99", "p999", "largest")}
    return {
        "completion": {"mean": times.mean / 1e12, **quantiles},
        "sent": int(outcome.sent.sum()),
        "repeated": int(outcome.repeated.sum()),
        "timeouts": int(outcome.timeouts.sum()),
        "marks": int(outcome.ports.marks.sum()),
        "drops": outcome.drops,
        "cuts": outcome.cuts,
        "losses": outcome.losses,
        "pauses": outcome.pauses,
        "deepest": int(outcome.ports.deepest.max(initial=0)),
    }


def write_packets(
    found: CollectiveBenchmark, place: Deployment, folder: Path, progress: Callable[[int, int], None] | None = None
) -> list[Path]:
    """Writes flows.csv, ports.csv and queues.csv of ``found``; which files. Times are in seconds.

    flows.csv has a row for each flow, ports.csv one for each port and class that had a packet, queues.csv what waited
    in the 16 ports of the deepest queues at a thousand times, bytes: for that ``found`` is simulated once more.
    """
    assert found.outcome is not None
    program = place.program(found.operation, found.size, collective=found.name)
    deepest = found.outcome.ports.deepest.sum(axis=1)
    watched = [int(link) for link in np.argsort(-deepest, kind="stable")[:_WATCHED] if deepest[link] > 0]
    network, every = place.fidelity.packets(found.topology), max(found.time // _SAMPLES, 1)
    outcome = network.run(program, watch=watched, every=every, progress=progress)
    names = [found.topology.link_name(link) for link in watched]
    trace = zip((to_seconds(int(time)) for time in outcome.trace.time), outcome.trace.bytes.tolist(), strict=True)
    tables: dict[str, tuple[Sequence[str], Iterable[Sequence[Any]]]] = {
        "flows": (("flow", "source", "target", "class", "bytes", *_TIMES, *_SENT), _flow_rows(found, program, outcome)),
        "ports": (("source", "target", "class", *_COUNTS), _port_rows(found.topology, outcome)),
        "queues": (("time", *names), ((time, *row) for time, row in trace)),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, (header, rows) in tables.items():
        _write_csv(folder / f"{name}.csv", header, rows)
    return [folder / f"{name}.csv" for name in tables]


def _flow_rows(found: CollectiveBenchmark, program: Program, outcome: Outcome) -> Iterable[Sequence[Any]]:
    for flow in np.flatnonzero(outcome.begun >= 0).tolist():
        yield (
            flow,
            *_ends(found.topology, program.paths.of(flow)),
            int(program.priority[flow]),
            int(program.size[flow] * program.steps[flow]),
            *(to_seconds(int(getattr(outcome, name)[flow])) for name in _TIMES),
            *(int(getattr(outcome, name)[flow]) for name in _SENT),
        )


def _ends(topology: Topology, links: Sequence[int] | np.ndarray) -> tuple[str, str]:
    nodes = topology.nodes
    return nodes[topology.source[links[0]]].name, nodes[topology.target[links[-1]]].name


def _port_rows(topology: Topology, outcome: Outcome) -> Iterable[Sequence[Any]]:
    ports = outcome.ports
    columns = [getattr(ports, name) for name in _COUNTS]
    for link, of in zip(*np.nonzero(ports.packets + ports.drops), strict=True):
        yield (*_ends(topology, [link]), int(of), *(int(column[link, of]) for column in columns))


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    write_atomically(path, text.getvalue())
