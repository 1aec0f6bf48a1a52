"""``foretrain lab``: a small cluster on this machine, made of network namespaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.extras import SubcommandApp

from foretrain.cli.lab_compare import compare

if TYPE_CHECKING:
    from rich.table import Table

    from foretrain.lab import HostStatus, Status

HELP = "A small cluster on this machine: hosts with links of the rate that you choose. Needs root."


def up(
    *,
    hosts: int = 4,
    rate: str = "1Gbps",
    queue: str = "8ms",
    congestion: Literal["cubic", "bbr", "reno"] | None = None,
    name: str = "lab",
) -> None:
    """Build a lab, or make the one that is there what is asked for.

    Args:
        hosts: how many.
        rate: of every host's link, each way, e.g. 1Gbps; "none" does not shape.
        queue: what a full queue in front of a link holds, as time at its rate.
        congestion: TCP congestion control; the machine's default when left out.
        name: distinguishes several labs.
    """
    from foretrain.lab import Lab

    lab = Lab.up(name, hosts, rate, queue=queue, congestion=congestion)
    first, last = lab.hosts[0], lab.hosts[-1]
    _print(f"lab {name!r} is up: hosts 0 to {last.index}, {first.address} to {last.address}, {_rate_text(rate)}")
    _print(f"run something on host 0: foretrain lab exec{_named(name)} 0 -- COMMAND")


def rate(
    rate: Annotated[str, tyro.conf.arg(metavar="RATE")],
    /,
    *,
    host: int | None = None,
    queue: str = "8ms",
    name: str = "lab",
) -> None:
    """Change the rate of all links, or of one host's, while traffic goes on.

    Args:
        rate: each way, e.g. 500Mbps; "none" does not shape.
        host: only this one's.
        queue: what a full queue in front of a link holds, as time at its rate.
        name: of the lab.
    """
    from foretrain.lab import Lab

    Lab.find(name).rate(rate, host, queue=queue)
    _print(f"lab {name!r}: {'all hosts' if host is None else f'host {host}'}, {_rate_text(rate)}")


def execute(
    host: Annotated[int, tyro.conf.arg(metavar="HOST")],
    command: Annotated[tuple[str, ...], tyro.conf.arg(metavar="-- COMMAND")],
    /,
    *,
    name: str = "lab",
) -> None:
    """Run a command on a host, as if it were typed there; the exit status is the command's.

    GLOO_SOCKET_IFNAME and TP_SOCKET_IFNAME name the host's interface, unless they are set.

    Args:
        host: its index, from 0.
        command: a program and its arguments.
        name: of the lab.
    """
    import os
    import shutil
    import sys

    from foretrain.errors import ConfigError
    from foretrain.lab import Lab

    if not command or shutil.which(command[0]) is None:
        raise ConfigError("command", " ".join(command), "is not a program that can be run", "write e.g. -- ip address")
    lab = Lab.find(name)
    arguments, interface = lab.command(host, command), lab.host(host).interface
    environment = {"GLOO_SOCKET_IFNAME": interface, "TP_SOCKET_IFNAME": interface} | os.environ
    sys.stdout.flush()
    # Becomes the command, so that the terminal, signals and the exit status are its own.
    os.execve(arguments[0], arguments, environment)


def status(*, name: str = "lab", json: bool = False) -> None:
    """Show hosts, rates, traffic and live processes, as the kernel has them now.

    Args:
        name: of the lab.
        json: print JSON; rates in bytes per second, the queue in seconds, traffic in bytes.
    """
    from rich.console import Console

    from foretrain.lab import Lab

    found = Lab.find(name).status()
    if json:
        import msgspec

        _print(msgspec.json.format(msgspec.json.encode(_plain(found)), indent=2).decode())
        return
    console = Console(highlight=False, markup=False)
    console.print(_table(found))
    for host in found.hosts:
        for fault in host.faults:
            console.print(f"host {host.host.index}: {fault}")
    if any(host.faults for host in found.hosts):
        console.print(f"mend it by the same 'foretrain lab up{_named(name)} ...' as before")


def down(*, name: str = "lab", kill: bool = False) -> None:
    """Remove a lab, whole or half built.

    Args:
        name: of the lab.
        kill: end the processes that live inside, first.
    """
    from foretrain.lab import labs, remove

    there = name in labs()
    alive = remove(name, kill=kill)
    _print(f"lab {name!r} is removed" if there else f"there is no lab {name!r}; nothing to remove")
    for process in alive:
        _print(f"still alive, without a network: {process.pid} {process.command}")


_COMMANDS = {"up": up, "rate": rate, "exec": execute, "status": status, "down": down, "compare": compare}
"""By the name to type."""


def commands() -> SubcommandApp:
    """The group ``foretrain lab``."""
    group = SubcommandApp()
    for name, command in _COMMANDS.items():
        group.command(command, name=name)
    return group


def _print(text: str) -> None:
    import sys

    sys.stdout.write(text + "\n")


def _named(name: str) -> str:
    return "" if name == "lab" else f" --name {name}"


def _rate_text(rate: str) -> str:
    return "not shaped" if rate == "none" else f"{rate} each way"


def _table(found: Status) -> Table:
    from rich.table import Table

    from foretrain.units import format_size, format_time

    table = Table(box=None, pad_edge=False, title=f"lab {found.name}", title_justify="left")
    for column in ("host", "namespace", "address"):
        table.add_column(column, no_wrap=True)
    for column in ("rate", "queue", "sent", "received", "dropped"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("processes", overflow="fold")
    for row in found.hosts:
        table.add_row(
            str(row.host.index),
            row.host.namespace,
            row.host.address,
            _rates(row),
            "" if row.queue is None else format_time(row.queue),
            format_size(row.sent),
            format_size(row.received),
            str(row.dropped),
            "\n".join(f"{process.pid} {process.command[:60]}" for process in row.processes),
        )
    return table


def _rates(row: HostStatus) -> str:
    from foretrain.units import format_rate

    send, receive = ("none" if rate is None else format_rate(rate) for rate in (row.rate, row.receive_rate))
    return send if send == receive else f"{send} out, {receive} in"


def _plain(found: Status) -> dict[str, Any]:
    import dataclasses

    from foretrain.units import to_seconds

    hosts = []
    for row in found.hosts:
        flat = dataclasses.asdict(row)
        host = flat.pop("host")
        flat["queue"] = None if row.queue is None else to_seconds(row.queue)
        flat["processes"] = [{"pid": process.pid, "command": process.command} for process in row.processes]
        hosts.append(host | flat)
    return {"name": found.name, "hosts": hosts}
