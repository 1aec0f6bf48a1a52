"""A host of a lab: what it is called, and what the kernel says about it.

Namespaces are ``ft-<lab>-sw`` and ``ft-<lab>-h<i>``, interfaces ``fth<i>`` at the host and ``ftp<i>`` at the switch,
whose bridge is ``ftbr``.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from foretrain.errors import ConfigError
from foretrain.lab import iproute
from foretrain.lab.processes import Process
from foretrain.units import SECOND, Time

MTU = 9000
MOST_HOSTS = 64
BRIDGE = "ftbr"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")


@dataclass(frozen=True, slots=True)
class LabHost:
    """A host of a lab: ``interface`` with the IPv4 ``address`` is its only one besides loopback."""

    index: int
    namespace: str
    interface: str
    address: str


@dataclass(frozen=True, slots=True)
class HostStatus:
    """What the kernel says about a host.

    Attributes:
        rate: bytes per second that it may send; None is unshaped.
        receive_rate: bytes per second that the switch sends to it; None is unshaped.
        queue: time that a full queue takes to drain; None when unshaped.
        congestion: congestion control of its route; None is the machine's default.
        sent: bytes since it was built, with TCP/IP and Ethernet headers.
        received: likewise.
        dropped: packets that found a queue full, in either direction, since it was shaped.
        processes: what lives inside.
        faults: what is not as `Lab.up` leaves it; mended by the same ``up`` again.
    """

    host: LabHost
    rate: float | None
    receive_rate: float | None
    queue: Time | None
    congestion: str | None
    sent: int
    received: int
    dropped: int
    processes: tuple[Process, ...]
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Status:
    """A lab as the kernel has it now."""

    name: str
    hosts: tuple[HostStatus, ...]


def checked_name(name: str) -> str:
    """``name``; ConfigError where a lab cannot have it."""
    if not _NAME.fullmatch(name):
        raise ConfigError("name", name, "is not a name for a lab", "use up to 31 of a-z, 0-9 and hyphens")
    return name


def hosts_of(name: str, count: int) -> tuple[LabHost, ...]:
    """The ``count`` hosts of lab ``name``; ConfigError where they are too many."""
    if not 1 <= count <= MOST_HOSTS:
        raise ConfigError("hosts", count, "is out of range", f"choose 1 to {MOST_HOSTS}")
    # Labs cannot see each other, so two with the same subnet are fine.
    subnet = f"10.77.{zlib.crc32(name.encode()) % 256}"
    return tuple(LabHost(i, f"ft-{name}-h{i}", f"fth{i}", f"{subnet}.{i + 1}") for i in range(count))


def switch_of(name: str) -> str:
    """The namespace of the switch of lab ``name``."""
    return f"ft-{name}-sw"


def port_of(host: LabHost) -> str:
    """The other end of its cable, at the switch."""
    return f"ftp{host.index}"


def index_of(namespace: str) -> int | None:
    """Of the host that a namespace is; None is the switch."""
    role = namespace.rpartition("-")[2]
    return None if role == "sw" else int(role[1:])


def lab_of(namespace: str) -> str | None:
    """The name of the lab that a namespace is of, if it is of any."""
    match = re.fullmatch(r"ft-(.+)-(?:sw|h\d+)", namespace)
    return match[1] if match and _NAME.fullmatch(match[1]) else None


def status_of(
    host: LabHost,
    ports: dict[str, dict[str, Any]],
    port_shapers: dict[str, dict[str, Any]],
    inside: Sequence[Process],
) -> HostStatus:
    """What the kernel says about ``host``.

    Args:
        host: whose.
        ports: interfaces of the switch, as `iproute.links` gives them.
        port_shapers: theirs, as `iproute.shapers` gives them.
        inside: the processes of the lab.
    """
    links = iproute.links(host.namespace)
    near, far = links[host.interface], ports[port_of(host)]
    sends, receives = iproute.shapers(host.namespace).get(host.interface), port_shapers.get(port_of(host))
    routes = iproute.routes(host.namespace, host.interface)
    controls = [
        metric["congestion"] for route in routes for metric in route.get("metrics", ()) if "congestion" in metric
    ]
    rate, receive_rate = _rate(sends), _rate(receives)
    return HostStatus(
        host,
        rate,
        receive_rate,
        round(sends["options"]["limit"] / rate * SECOND) if sends and rate else None,
        controls[0] if controls else None,
        near["stats64"]["tx"]["bytes"],
        near["stats64"]["rx"]["bytes"],
        sum(shaper.get("drops", 0) for shaper in (sends, receives) if shaper),
        tuple(process for process in inside if process.host == host.index),
        tuple(_faults(host, links, far, rate, receive_rate)),
    )


def _rate(shaper: dict[str, Any] | None) -> float | None:
    return float(shaper["options"]["rate"]) if shaper else None


def _faults(
    host: LabHost, links: dict[str, dict[str, Any]], far: dict[str, Any], rate: float | None, receive_rate: float | None
) -> Iterator[str]:
    near = links[host.interface]
    for interface in ("lo", host.interface):
        if "UP" not in links[interface]["flags"]:
            yield f"{interface} is down"
    if "UP" not in far["flags"] or far.get("master") != BRIDGE:
        yield "its port of the switch is down or unplugged"
    if near["mtu"] != MTU or far["mtu"] != MTU:
        yield f"its MTU is {min(near['mtu'], far['mtu'])}"
    if all(address["local"] != host.address for address in near["addr_info"]):
        yield f"it has no address {host.address}"
    if rate != receive_rate:
        yield "it sends and receives at different rates"
