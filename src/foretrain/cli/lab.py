"""``foretrain lab``: a small cluster on this machine, made of network namespaces."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from foretrain.cli.arguments import (
    JsonFile,
    NameText,
    RateText,
    ScheduleText,
    ShareText,
    TimeText,
    check_writable,
    command_line,
    split,
    write_outputs,
    write_status,
)
from foretrain.cli.progress import bars
from foretrain.files import stdout_console, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from foretrain.lab import HostStatus, Status
    from foretrain.lab.conditions import Conditions
    from foretrain.lab.host import BackgroundStatus, Process
    from foretrain.lab.messages import LabProgress

HELP = "Build and use a small cluster on this machine. Needs root."
_TRACED = 3
"""Iterations of a case that a page or a trace shows."""


def up(
    *,
    hosts: int = 4,
    rate: RateText = "1Gbps",
    queue: TimeText = "8ms",
    congestion: Literal["cubic", "bbr", "reno"] | None = None,
    bands: int = 1,
    drop: Literal["tail", "selective"] = "tail",
    loss: ShareText = "0%",
    burst: float = 1,
    lossy_host: int | None = None,
    background: ShareText = "0%",
    name: NameText = "lab",
    json: JsonFile = None,
) -> None:
    """Build a lab, or change an existing one to these options.

    Args:
        hosts: number of hosts.
        rate: rate of every host's link in each direction, e.g. 1Gbps; "none" does not shape.
        queue: capacity of the queue in front of a link, as time at its rate.
        congestion: TCP congestion control; by default the machine's.
        bands: priority classes of each port, 1 to 3, which a packet's DSCP chooses: AF4x goes first, what has
            none last.
        drop: what a full queue of the switch drops; selective drops first what DSCP AFx3 says may be dropped.
        loss: share of packets that is lost at random, e.g. 1%.
        burst: mean number of packets that are lost in a row; needs a loss.
        lossy_host: lose only what goes to this host, and let background go there; needs one of the two.
        background: share of a port's rate, lossy-host's or the last one's, that bursts of other hosts take, e.g. 40%.
        name: name of the lab; several may exist.
        json: write what status --json writes.
    """
    from foretrain.lab import Lab
    from foretrain.lab.conditions import Conditions
    from foretrain.units import parse_share

    check_writable(json=json)
    conditions = Conditions(
        bands, drop, parse_share(loss, "loss"), lossy_host, parse_share(background, "background"), burst
    )
    lab = Lab.up(name, hosts, rate, queue=queue, congestion=congestion, conditions=conditions)
    first, last = lab.hosts[0], lab.hosts[-1]
    _print(f"lab {name!r} is up: hosts 0 to {last.index}, {first.address} to {last.address}, {_rate_text(rate)}")
    _print(f"run something on host 0: foretrain lab exec{_named(name)} 0 -- COMMAND")
    if json is not None:
        write_json(json, _plain(lab.status()))


def rate(
    rate: Annotated[str, tyro.conf.arg(metavar="RATE")],
    /,
    *,
    host: int | None = None,
    queue: TimeText = "8ms",
    name: NameText = "lab",
    json: JsonFile = None,
) -> None:
    """Change the rate of all links, or of one host's, while traffic continues.

    Bands, drop, loss and background stay as they are; background keeps its share of the port's rate.

    Args:
        rate: rate in each direction, e.g. 500Mbps; "none" does not shape.
        host: change only this host's link.
        queue: capacity of the queue in front of a link, as time at its rate.
        name: name of the lab.
        json: write what status --json writes.
    """
    from foretrain.lab import Lab

    check_writable(json=json)
    lab = Lab.find(name)
    lab.rate(rate, host, queue=queue)
    _print(f"lab {name!r}: {'all hosts' if host is None else f'host {host}'}, {_rate_text(rate)}")
    if json is not None:
        write_json(json, _plain(lab.status()))


def execute(
    host: Annotated[int, tyro.conf.arg(metavar="HOST")],
    command: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="-- COMMAND [ARGUMENT ...]", help_behavior_hint="(required)")
    ],
    /,
    *,
    name: NameText = "lab",
) -> None:
    """Run a command on a host; the exit status is the command's.

    GLOO_SOCKET_IFNAME and TP_SOCKET_IFNAME name the host's interface, unless they are set.

    Args:
        host: index of the host, from 0.
        command: a program and its arguments.
        name: name of the lab.
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
    # exec, so that the command has the terminal, the signals and the exit status.
    os.execve(arguments[0], arguments, environment)


def status(*, name: NameText = "lab", json: JsonFile = None) -> None:
    """Show hosts, rates, traffic, queues and processes, as the kernel reports them now.

    Args:
        name: name of the lab.
        json: write the numbers; rates in bytes per second, the queue in seconds, traffic in bytes.
    """
    from foretrain.lab import Lab

    found = Lab.find(name).status()
    console = stdout_console(markup=False)
    write_outputs(console, (json, lambda path: write_json(path, _plain(found))))
    made = {"ets": ", queues of ets and red", "htb": ", queues of htb", None: ""}[found.queues]
    conditions = "" if found.conditions.plain else f": {_conditions_text(found.conditions)}{made}"
    console.print(f"lab {found.name!r}{conditions}", soft_wrap=True)
    console.print(_table(found))
    for host in found.hosts:
        for process in host.processes:
            console.print(f"host {host.host.index} runs {process.pid} {process.command[:60]}")
    if (queues := _queue_table(found)).row_count:
        console.print(queues)
    if found.background:
        console.print(_background_text(found.background))
    for host in found.hosts:
        for fault in host.faults:
            console.print(f"host {host.host.index}: {fault}")
    if any(host.faults for host in found.hosts):
        console.print(f"repair it with the same 'foretrain lab up{_named(name)} ...' as before")


def down(*, name: NameText = "lab", kill: bool = False, json: JsonFile = None) -> None:
    """Remove a lab, complete or not.

    Args:
        name: name of the lab.
        kill: end the processes inside first.
        json: write whether there was one, and the processes that are still alive.
    """
    from foretrain.lab import labs, remove

    check_writable(json=json)
    there = name in labs()
    alive = remove(name, kill=kill)
    _print(f"lab {name!r} is removed" if there else f"there is no lab {name!r}; nothing to remove")
    for process in alive:
        _print(f"still alive, without a network: {process.pid} {process.command}")
    if json is not None:
        write_json(json, {"name": name, "removed": there, "alive": [_process(process) for process in alive]})


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

    table = Table(box=None, pad_edge=False)
    for column in ("host", "namespace", "address"):
        table.add_column(column, no_wrap=True)
    for column in ("rate", "queue", "sent", "received", "dropped", "lost"):
        table.add_column(column, justify="right", no_wrap=True)
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
            str(row.lost),
        )
    return table


def _background_text(flows: BackgroundStatus) -> str:
    from foretrain.units import format_rate, format_size

    where = "" if flows.host is None else f" to host {flows.host}"
    speed = f"{format_rate(flows.rate)}{where}, {format_size(flows.sent)} so far"
    return f"background flows: {flows.senders} of {flows.sources} senders, {speed}"


def _conditions_text(conditions: Conditions) -> str:
    bands = f"{conditions.bands} band{'s' * (conditions.bands > 1)}"
    words = [bands, f"{conditions.drop} drop"]
    lossy = "" if conditions.lossy_host is None else f" to host {conditions.lossy_host}"
    if conditions.loss:
        bursts = f" in bursts of {conditions.burst:g}" if conditions.burst > 1 else ""
        words.append(f"{100 * conditions.loss:g}% of packets lost{lossy}{bursts}")
    if conditions.background:
        words.append(f"background of {100 * conditions.background:g}%")
    return ", ".join(words)


def _queue_table(found: Status) -> Table:
    """Return a table of the switch's queues to each host, without those to which nothing came."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("to host", no_wrap=True)
    table.add_column("queue", no_wrap=True)
    for column in ("packets sent", "dropped", "share dropped", "marked"):
        table.add_column(column, justify="right", no_wrap=True)
    for host in found.hosts:
        for band in host.bands:
            if came := band.sent + band.dropped:
                name = f"band {band.band}" + ", droppable" * band.droppable
                share = f"{band.dropped / came:.2%}" if band.dropped else ""
                marked = "" if band.marked is None else str(band.marked)
                table.add_row(str(host.host.index), name, str(band.sent), str(band.dropped), share, marked)
    return table


def _rates(row: HostStatus) -> str:
    from foretrain.units import format_rate

    send, receive = ("none" if rate is None else format_rate(rate) for rate in (row.rate, row.receive_rate))
    return send if send == receive else f"{send} out, {receive} in"


def _process(process: Process) -> dict[str, Any]:
    return {"pid": process.pid, "command": process.command}


def _plain(found: Status) -> dict[str, Any]:
    import dataclasses

    from foretrain.units import to_seconds

    hosts = []
    for row in found.hosts:
        flat = dataclasses.asdict(row)
        host = flat.pop("host")
        flat["queue"] = None if row.queue is None else to_seconds(row.queue)
        flat["processes"] = [_process(process) for process in row.processes]
        hosts.append(host | flat)
    background = dataclasses.asdict(found.background) if found.background else None
    conditions = dataclasses.asdict(found.conditions)
    return {
        "name": found.name,
        "conditions": conditions,
        "queues": found.queues,
        "hosts": hosts,
        "background": background,
    }


def compare(
    model: Annotated[str, tyro.conf.arg(metavar="MODEL")],
    /,
    *,
    hosts: int = 2,
    rate: RateText = "1Gbps",
    servers: Annotated[str | None, tyro.conf.arg(metavar="K|colocated")] = None,
    cores: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    compute: Literal["paced", "real"] | None = None,
    schedules: tuple[ScheduleText, ...] | None = None,
    ratio: float | None = None,
    step_time: TimeText | None = None,
    iterations: int = 15,
    rounds: int = 3,
    straggler: ShareText = "0%",
    jitter: ShareText = "0%",
    seed: int = 0,
    name: NameText = "compare",
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    html: Path | None = None,
    trace: Path | None = None,
    json: JsonFile = None,
) -> None:
    """Train for real under every schedule; compare with DDP at its best, the optimum and the forecast.

    With --servers gradients are exchanged over parameter servers, and the baseline is fifo, which has a barrier.

    Args:
        model: a model of the zoo (foretrain catalog lists them), or transformer, which computes for real.
        hosts: number of hosts that train.
        rate: rate of every host's link in each direction.
        servers: number of parameter servers on hosts of their own, or colocated: one on every host that trains.
        cores: pin every host to one of the machine's first N cores, in turn.
        compute: paced (layers sleep for an accelerator's time) or real; by default the model's only choice.
        schedules: policies, e.g. "bytescheduler(partition=1MB)" prophet; a suffix "+fp16" compresses gradients.
        ratio: communication over computation; sets the time to compute. 1 by default.
        step_time: the time to compute, instead of a ratio, e.g. 300ms.
        iterations: measured iterations of every case, in all rounds together.
        rounds: number of rounds in which the cases take turns.
        straggler: slowdown of the last host, e.g. 20%.
        jitter: variation of each layer's time, e.g. 30%.
        seed: seed of all randomness.
        name: name of the lab, which is built and removed.
        dry_run: only say what would be measured and about how long that takes, also in the numbers of --json.
        html: write an interactive page.
        trace: write a trace for ui.perfetto.dev (.json for Chrome's format).
        json: write the numbers.
    """
    from foretrain.lab.compare import SCHEDULES, duration, experiment, plan_of
    from foretrain.lab.compare import compare as compare_all
    from foretrain.report.lab import lab_page, lab_summary, lab_trace
    from foretrain.units import parse_share, parse_time

    check_writable(html=html, trace=trace, json=json)
    options = {
        "compute": compute,
        "schedules": tuple(part for text in schedules or () for part in split(text)) or SCHEDULES,
        "ratio": ratio,
        "step_time": parse_time(step_time, "step-time") if step_time else None,
        "iterations": iterations,
        "rounds": rounds,
        "straggler": parse_share(straggler, "straggler"),
        "jitter": parse_share(jitter, "jitter"),
        "seed": seed,
        "traced": _TRACED if html is not None or trace is not None else 0,
    }
    asked = experiment(model, hosts=hosts, rate=rate, servers=servers, **options)
    seconds = duration(plan_of((asked,), hosts=hosts, rate=rate, servers=servers, cores=cores))
    said = f"{len(asked.cases)} cases, {iterations} iterations each in {rounds} rounds: about {seconds / 60:.1f} min"
    if dry_run:
        sys.stdout.write(f"{said}\n")
        expected = {"cases": len(asked.cases), "seconds": seconds}
        write_outputs(stdout_console(), (json, lambda path: write_json(path, expected)))
        return
    write_status(said)
    with _bar() as progress:
        place = {"hosts": hosts, "rate": rate, "servers": servers, "cores": cores}
        result = compare_all(model, **place, name=name, progress=progress, **options)
    console = stdout_console()
    console.print(lab_summary(result))
    write_outputs(
        console,
        (html, lambda path: lab_page(result, path, command_line())),
        (trace, lambda path: lab_trace(result, path)),
        (json, lambda path: write_json(path, result.to_dict())),
    )


@contextmanager
def _bar() -> Iterator[Callable[[LabProgress], None]]:
    """Show a bar with an ETA on stderr."""
    with bars() as bar:
        task = bar.add_task("building the lab", total=None)
        yield lambda now: bar.update(task, description=now.what, completed=now.done, total=now.total)


COMMANDS = {"up": up, "rate": rate, "exec": execute, "status": status, "down": down, "compare": compare}
"""Subcommands of ``foretrain lab`` by name."""
