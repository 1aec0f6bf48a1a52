"""``foretrain topology``: what a topology is made of, and the names they go by."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from tyro.extras import SubcommandApp

HELP = "Networks: what one is made of, as a summary, a picture or a file, and which are known by name."


def show(
    topology: Annotated[str, tyro.conf.arg(metavar="TOPOLOGY")],
    /,
    *,
    html: Path | None = None,
    json: Path | None = None,
    save: Path | None = None,
) -> None:
    """What a topology is made of: counts, rates, diameter, bisection bandwidth, oversubscription, faults.

    Args:
        topology: e.g. fat_tree:8@100Gbps, bigraph:8x4,server=eflops, dgx-h100:16, or a .toml or .graphml file.
        html: write an interactive picture.
        json: write the numbers; rates in bytes per second, times in seconds.
        save: write every node and link, as .toml or .graphml, to edit and to read again.
    """
    from rich.console import Console

    from foretrain.cli.arguments import check_writable
    from foretrain.files import write_atomically
    from foretrain.network.topology.file import check_format
    from foretrain.network.topology.file import save as save_topology
    from foretrain.network.topology.notation import topology as read
    from foretrain.report.topology import numbers, page, summary

    check_writable(html=html, json=json, save=save)
    if save:
        check_format(save)
    made = read(topology)
    console = Console(highlight=False, markup=False)
    console.print(summary(made))
    if html:
        page(made, html)
    if json:
        import msgspec

        write_atomically(json, msgspec.json.format(msgspec.json.encode(numbers(made)), indent=2))
    if save:
        save_topology(made, save)
    for path in filter(None, (html, json, save)):
        console.print(f"wrote {path}", markup=False, soft_wrap=True)


def list_() -> None:
    """List the fabrics and servers known by name, and how to write them."""
    from rich.console import Console
    from rich.table import Table

    from foretrain.network.fabrics import FABRICS
    from foretrain.network.servers import SERVERS, preset
    from foretrain.units import format_rate

    fabrics, servers = (Table(box=None, pad_edge=False, title=title, title_justify="left") for title in _TITLES)
    for table, columns in ((fabrics, ("fabric", "write", "options")), (servers, ("server", "GPUs", "NICs", "each"))):
        for column in columns:
            table.add_column(column, no_wrap=column != "options")
    for name, fabric in FABRICS.items():
        fabrics.add_row(name, fabric.example, ", ".join(fabric.options))
    for name in SERVERS[1:]:
        server = preset(name)
        port = "" if server.port is None else format_rate(server.port)
        servers.add_row(name, str(server.gpus), str(server.nics), port)
    console = Console(highlight=False, markup=False)
    console.print(fabrics, "", servers, sep="\n")


_TITLES = ("FABRIC:SHAPE[@RATE][,OPTION=...], all with latency=T and server=NAME:", "SERVER:COUNT, rail-optimised:")
_COMMANDS = {"show": show, "list": list_}
"""By the name to type."""


def commands() -> SubcommandApp:
    """The group ``foretrain topology``."""
    group = SubcommandApp()
    for name, command in _COMMANDS.items():
        group.command(command, name=name)
    return group
