"""Background flows of a lab: hosts of their own that send bursts to one host, and so fill the queue of its port.

Their datagrams go to an address that the receiving host discards: it needs no process for them, and answers nothing.
They are not marked, which makes them the last band's. The kernel keeps their state, as all of a lab's: sources are
namespaces, and the command of each sender says what it sends.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from foretrain.lab import iproute
from foretrain.lab.host import BackgroundStatus, LabHost, Process, inside, is_source, port_of, sources_of, switch_of
from foretrain.lab.iproute import LabError

_SENDER = Path(__file__).with_name("sender.py")
_DISCARD = 254
"""Last number of the address that hosts discard."""


def senders(namespaces: Iterable[str]) -> tuple[Process, ...]:
    """Return the processes on the sources among ``namespaces``."""
    return inside({namespace: None for namespace in namespaces if is_source(namespace)})


def start(name: str, target: LabHost, rate: float, owner: int) -> None:
    """Start a sender on each source of lab ``name``.

    Args:
        name: of the lab.
        target: host whose port is congested.
        rate: bytes/s of all together.
        owner: process with which they end; 0 lets them live as long as the lab.
    """
    sources = sources_of(name)
    address = f"{target.address.rpartition('.')[0]}.{_DISCARD}"
    hardware = iproute.links(target.namespace)[target.interface]["address"]
    ip = iproute.tool("ip")
    iproute.run(ip, "-n", target.namespace, "route", "replace", "blackhole", f"{address}/32")
    # Or the switch would send to all ports what goes to a host that was silent for long.
    entry = f"fdb replace {hardware} dev {port_of(target)} master static"
    iproute.run(iproute.tool("bridge"), "-n", switch_of(name), lines=[entry])
    for source in sources:
        neighbour = f"neighbour replace {address} lladdr {hardware} dev {source.interface} nud permanent"
        iproute.run(ip, "-n", source.namespace, lines=[neighbour])
        words = [source.namespace, address, str(target.index), str(rate / len(sources)), str(owner)]
        done = subprocess.run(
            [ip, "netns", "exec", source.namespace, sys.executable, "-I", "-S", str(_SENDER), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            env={},
            process_group=0,
        )
        if done.returncode:
            raise LabError(f"the background flow on {source.namespace} does not start: {' '.join(done.stderr.split())}")


def background_of(
    name: str, namespaces: Iterable[str], ports: Mapping[str, Mapping[str, Any]]
) -> BackgroundStatus | None:
    """Return the state of background flows, given a lab's namespaces and the switch's interfaces; None without any."""
    sources = [source for source in sources_of(name) if source.namespace in set(namespaces)]
    if not sources:
        return None
    alive = [process.command.split() for process in senders(source.namespace for source in sources)]
    flows = [words for words in alive if str(_SENDER) in words]
    sent = sum(ports[port_of(source)]["stats64"]["rx"]["bytes"] for source in sources if port_of(source) in ports)
    host = int(flows[0][-3]) if flows else None
    return BackgroundStatus(host, sum(float(words[-2]) for words in flows), len(flows), len(sources_of(name)), sent)
