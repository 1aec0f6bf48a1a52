"""Collectives side by side on one network, for a terminal and as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from foretrain.network.collective_benchmark import CollectiveBenchmark
from foretrain.report import packets
from foretrain.units import format_size, format_time, to_seconds

if TYPE_CHECKING:
    from rich.table import Table


def table(found: Sequence[CollectiveBenchmark]) -> Table:
    """A row for each, in the order given."""
    from rich.table import Table

    first = found[0]
    title = f"{first.operation} of {format_size(first.size)} among {first.ranks} ranks of {first.topology.name}"
    made = Table(box=None, pad_edge=False, title=title, title_justify="left", caption_justify="left")
    made.caption = f"ports: what the slowest port must carry at the least takes {format_time(first.least)}"
    for name in ("collective", "time", "bus bandwidth", "× ports", "busiest link", "used"):
        made.add_column(name, justify="left" if name in ("collective", "busiest link") else "right")
    for one in found:
        source, target, used = one.busiest
        ratio = f"{one.time / one.least:.2f}"
        rate = f"{one.bandwidth / 1e9:.3g} GB/s"
        made.add_row(one.name, format_time(one.time), rate, ratio, f"{source} → {target}", f"{used:.0%}")
    return made


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
            **({} if one.outcome is None else {"packets": packets.numbers(one.outcome)}),
        }
        for one in found
    ]
