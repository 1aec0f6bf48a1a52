"""The network of a lab: one namespace per host, one for the switch, shaped veth pairs between them.

    with Lab.up("mine", hosts=4, rate="1Gbps") as lab:
        lab.rate("500Mbps", host=2)
        print(lab.status().hosts[2].sent)

Each host has one interface of 9000 bytes MTU, an address in a /24 of its lab's own, and its own loopback. A token
bucket (tbf) on either end of its cable shapes what it sends and what it receives. Nothing is visible from the
machine's own network, and several labs stand side by side. Names: namespaces ``ft-<lab>-sw`` and ``ft-<lab>-h<i>``,
interfaces ``fth<i>`` at the host and ``ftp<i>`` at the switch, whose bridge is ``ftbr``.

Note [The kernel keeps the state]: there is no file that says which labs exist. What a lab is, is read back with
``ip -j`` and ``tc -j`` whenever it matters, so a crash cannot leave a record that differs from the network.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import re
import shutil
import socket
import subprocess
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeAlias

from foretrain.errors import ConfigError, ForetrainError
from foretrain.lab.processes import Process, end, inside, uninterrupted
from foretrain.units import MILLISECOND, SECOND, Time, parse_rate, parse_time

Congestion: TypeAlias = Literal["cubic", "bbr", "reno"]
"""TCP congestion control on the lab's routes; None leaves the machine's default."""

QUEUE: Time = 8 * MILLISECOND
MTU = 9000
MOST_HOSTS = 64
_BRIDGE = "ftbr"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
# Above a GSO packet (64 KiB), or tbf would cut each into segments and the CPU would become the bottleneck.
_LEAST_BURST = 96 * 2**10
_LEAST_LIMIT = 512 * 2**10
_SLOWEST, _FASTEST = 125_000.0, 1.25e11  # 1 Mbps: there _LEAST_BURST is 0.8 s already; 1 Tbps: no machine's memory

_log = logging.getLogger(__name__)


class LabError(ForetrainError):
    """A lab cannot be built, found or used; says what to type instead."""


@dataclass(frozen=True, slots=True)
class Host:
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

    host: Host
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


class Lab:
    """A lab that exists. Made by `up`, found by `find`; as a context manager it is removed at the end of the block.

    Exceptions and Ctrl-C end the block too, and SIGTERM where the ``foretrain`` command runs. SIGKILL does not: what it
    leaves is taken over by the next `up` of that name, or removed by `remove`.

    Attributes:
        name: what distinguishes it from other labs on this machine.
        hosts: in the order of their indices.
    """

    def __init__(self, name: str, hosts: int) -> None:
        self.name, self.hosts = name, _hosts(name, hosts)

    @classmethod
    def up(
        cls,
        name: str = "lab",
        hosts: int = 2,
        rate: str | float | None = None,
        *,
        queue: str | Time = QUEUE,
        congestion: Congestion | None = None,
    ) -> Lab:
        """Builds a lab, or makes the one of that name what is asked for.

        A lab whose namespaces and cables are right is mended and shaped in place, and what runs inside goes on.
        Any other (another number of hosts, half built, half removed) is removed and built anew. When that fails,
        nothing is left behind. About 0.1 s for 4 hosts.

        Args:
            name: lower-case letters, digits and hyphens.
            hosts: 1 to 64.
            rate: of every host's link, each way: text such as "1Gbps", bytes per second, or None or "none".
            queue: how much a full queue in front of a link holds, as time at its rate; 512 KiB at least.
            congestion: TCP congestion control of the hosts.

        Raises:
            ConfigError: an argument is wrong.
            LabError: no root, no iproute2, the kernel refuses, or processes live in a lab that must be built anew.
        """
        lab = cls(_checked_name(name), hosts)
        shape = _Shape.of(rate, queue)
        _require()
        with _exclusive(name):
            built = False
            try:
                if _broken(lab):
                    _refuse_busy(lab)
                    built = True
                    _delete(name)
                    _create(lab)
                _configure(lab, congestion)
                _apply(lab.hosts, shape)
            except BaseException:
                if built:
                    with uninterrupted():
                        _delete(name)
                raise
        return lab

    @classmethod
    def find(cls, name: str = "lab") -> Lab:
        """The lab of that name. LabError when there is none, or when it is only half there."""
        _require()
        found = _namespaces(_checked_name(name))
        if not found:
            known = ", ".join(labs()) or "none"
            raise LabError(
                f"there is no lab {name!r} (known: {known}); build it: foretrain lab up --name {name} --hosts 4"
            )
        lab = cls(name, max((_index(namespace) or 0 for namespace in found), default=0) + 1)
        if fault := _broken(lab):
            raise LabError(
                f"lab {name!r} is only half there ({fault}); build it anew: foretrain lab up --name {name}, "
                f"or remove it: foretrain lab down --name {name}"
            )
        return lab

    def rate(self, rate: str | float | None, host: int | None = None, *, queue: str | Time = QUEUE) -> None:
        """Shapes the link of ``host``, or of all, anew; both directions. Traffic goes on meanwhile."""
        shape = _Shape.of(rate, queue)
        _require()
        with _exclusive(self.name):
            _apply(self.hosts if host is None else (self.host(host),), shape)

    def host(self, index: int) -> Host:
        """One host; ConfigError when the lab has none of that index."""
        if not 0 <= index < len(self.hosts):
            raise ConfigError("host", index, f"is not in lab {self.name!r}", f"choose 0 to {len(self.hosts) - 1}")
        return self.hosts[index]

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """The arguments that run ``command`` inside a host."""
        return [_tool("ip"), "netns", "exec", self.host(host).namespace, *command]

    def status(self) -> Status:
        """What the kernel says now. LabError when the lab is gone or only half there."""
        found = Lab.find(self.name)
        switch = _links(_switch(self.name)), _shapers(_switch(self.name))
        inside = processes(self.name)
        return Status(self.name, tuple(_host_status(host, *switch, inside) for host in found.hosts))

    def down(self, *, kill: bool = False) -> tuple[Process, ...]:
        """`remove` of this lab."""
        return remove(self.name, kill=kill)

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self.down():
            _log.warning("lab %s is removed, but process %d lives on: %s", self.name, process.pid, process.command)


def labs() -> tuple[str, ...]:
    """The names of all labs of this machine, whole or not."""
    _require()
    found = (re.fullmatch(r"ft-(.+)-(?:sw|h\d+)", entry["name"]) for entry in _ask(_tool("ip"), "-j", "netns", "list"))
    return tuple(sorted({match[1] for match in found if match and _NAME.fullmatch(match[1])}))


def remove(name: str = "lab", *, kill: bool = False) -> tuple[Process, ...]:
    """Removes all that carries the lab's prefix, whole or half built; nothing to remove is no error.

    Returns:
        The processes that lived inside and live on, now without a network. With ``kill`` they are ended first
        (SIGTERM, after three seconds SIGKILL), and only what survives that is returned.
    """
    _checked_name(name)
    _require()
    with _exclusive(name), uninterrupted():
        alive = processes(name)
        if any(process.pid == os.getpid() for process in alive):
            raise LabError(f"this runs inside lab {name!r}; remove it from outside")
        if kill:
            end(lambda: processes(name))
            alive = processes(name)
        _delete(name)
    return alive


def processes(name: str) -> tuple[Process, ...]:
    """The processes inside a lab, by pid."""
    return inside({namespace: _index(namespace) for namespace in _namespaces(name)})


@dataclass(frozen=True, slots=True)
class _Shape:
    """A token bucket: ``rate`` in bytes per second, None for no shaping; ``burst`` and ``limit`` in bytes."""

    rate: float | None
    burst: int = 0
    limit: int = 0

    @classmethod
    def of(cls, rate: str | float | None, queue: str | Time) -> _Shape:
        speed = parse_rate(rate) if isinstance(rate, str) and rate != "none" else rate
        patience = parse_time(queue, "queue") if isinstance(queue, str) else queue
        if speed is None or isinstance(speed, str):
            return cls(None)
        if not _SLOWEST <= speed <= _FASTEST:
            raise ConfigError("rate", rate, "is not between 1Mbps and 1Tbps", "write e.g. '1Gbps', or 'none'")
        limit = max(_LEAST_LIMIT, math.ceil(speed * patience / SECOND))
        if patience <= 0 or limit >= 2**31:
            raise ConfigError("queue", queue, "is not above 0 and below 2 GiB at this rate", "write e.g. '8ms'")
        return cls(speed, max(_LEAST_BURST, math.ceil(speed / 1000)), limit)

    def on(self, interface: str) -> str:
        """The line for ``tc -batch``."""
        if self.rate is None:
            return f"qdisc replace dev {interface} root noqueue"
        bits = round(self.rate * 8)
        return f"qdisc replace dev {interface} root handle 1: tbf rate {bits}bit burst {self.burst} limit {self.limit}"


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError("name", name, "is not a name for a lab", "use up to 31 of a-z, 0-9 and hyphens")
    return name


def _hosts(name: str, count: int) -> tuple[Host, ...]:
    if not 1 <= count <= MOST_HOSTS:
        raise ConfigError("hosts", count, "is out of range", f"choose 1 to {MOST_HOSTS}")
    # Labs cannot see each other, so two with the same subnet are fine.
    subnet = f"10.77.{zlib.crc32(name.encode()) % 256}"
    return tuple(Host(i, f"ft-{name}-h{i}", f"fth{i}", f"{subnet}.{i + 1}") for i in range(count))


def _switch(name: str) -> str:
    return f"ft-{name}-sw"


def _index(namespace: str) -> int | None:
    """Of the host that a namespace is; None is the switch."""
    role = namespace.rpartition("-")[2]
    return None if role == "sw" else int(role[1:])


def _port(host: Host) -> str:
    return f"ftp{host.index}"


def _require() -> None:
    if os.geteuid() != 0:
        raise LabError("a lab needs root, because it makes network namespaces; put sudo before the command")
    for tool in ("ip", "tc"):
        _tool(tool)


def _tool(name: str) -> str:
    if (path := shutil.which(name)) is None:
        raise LabError(
            f"a lab needs the command {name!r}, which is not on the PATH; install iproute2: "
            "apt-get install iproute2, or dnf install iproute iproute-tc"
        )
    return path


def _run(*command: str, lines: Sequence[str] = ()) -> str:
    """The output of ``ip`` or ``tc``; ``lines`` go to its ``-batch -``. LabError when it fails."""
    done = subprocess.run(
        [*command, "-batch", "-"] if lines else command,
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=False,
        process_group=0,  # Ctrl-C is for us alone: it shall not kill a half done batch beneath us
    )
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        remedy = ""
        if "not permitted" in said or "denied" in said:
            remedy = "; inside a container, start that with --privileged, or --cap-add SYS_ADMIN --cap-add NET_ADMIN"
        raise LabError(f"'{' '.join([Path(command[0]).name, *command[1:]])}' failed: {said}{remedy}")
    return done.stdout


def _ask(*command: str) -> list[dict[str, Any]]:
    return json.loads(_run(*command) or "[]")


def _namespaces(name: str) -> list[str]:
    """The lab's namespaces. Anchored: those of lab 'a-b' are none of lab 'a'."""
    pattern = re.compile(rf"ft-{re.escape(name)}-(?:sw|h\d+)")
    return [entry["name"] for entry in _ask(_tool("ip"), "-j", "netns", "list") if pattern.fullmatch(entry["name"])]


def _links(namespace: str) -> dict[str, dict[str, Any]]:
    """Interfaces with addresses and counters, by name."""
    found = _ask(_tool("ip"), "-j", "-s", "-n", namespace, "address", "show")
    return {link["ifname"]: link for link in found if "ifname" in link}


def _shapers(namespace: str) -> dict[str, dict[str, Any]]:
    """Root token buckets, by interface. Raw (-r), because otherwise tc leaves out the limit."""
    found = _ask(_tool("tc"), "-j", "-r", "-s", "-n", namespace, "qdisc", "show")
    return {entry["dev"]: entry for entry in found if entry.get("kind") == "tbf" and entry.get("root")}


def _broken(lab: Lab) -> str | None:
    """What is wrong with a lab's namespaces and cables, which cannot be mended in place; None when all is there."""
    found = set(_namespaces(lab.name))
    wanted = {_switch(lab.name), *(host.namespace for host in lab.hosts)}
    if found != wanted:
        return f"{'missing' if found < wanted else 'unexpected'}: {', '.join(sorted(found ^ wanted))}"
    try:
        ports = _links(_switch(lab.name))
        if _BRIDGE not in ports:
            return "the switch has no bridge"
        for host in lab.hosts:
            near, far = _links(host.namespace).get(host.interface), ports.get(_port(host))
            joined = near and far and near.get("link_index") == far["ifindex"] and far["link_index"] == near["ifindex"]
            if not joined:
                return f"host {host.index} has no cable"
    except LabError as error:
        # E.g. a name in /run/netns that outlived its namespace, after a reboot.
        return str(error)
    return None


def _refuse_busy(lab: Lab) -> None:
    if alive := processes(lab.name):
        raise LabError(
            f"lab {lab.name!r} must be built anew, but processes live inside ({_listed(alive)}); end them, or let "
            f"'foretrain lab down --name {lab.name} --kill' do it"
        )


def _listed(alive: Sequence[Process]) -> str:
    shown = ", ".join(f"{process.pid} {process.command[:60]}" for process in alive[:5])
    return shown + (f" and {len(alive) - 5} more" if len(alive) > 5 else "")


def _create(lab: Lab) -> None:
    switch = _switch(lab.name)
    # Cables are born inside the namespaces: nothing ever shows up in the machine's own network.
    cables = [
        f"link add name {host.interface} netns {host.namespace} type veth peer name {_port(host)} netns {switch}"
        for host in lab.hosts
    ]
    spaces = [f"netns add {namespace}" for namespace in (switch, *(host.namespace for host in lab.hosts))]
    _run(_tool("ip"), lines=[*spaces, *cables])
    _run(_tool("ip"), "-n", switch, lines=[f"link add name {_BRIDGE} type bridge mcast_snooping 0"])


def _configure(lab: Lab, congestion: Congestion | None) -> None:
    """Addresses, MTU, routes; every line may be repeated, which mends what has been changed by hand."""
    # Without IPv6 addresses there are no router solicitations, and the counters count what was sent on purpose.
    quiet = "addrgenmode none" if Path("/proc/net/if_inet6").exists() else ""
    ip = _tool("ip")
    ports = [f"link set dev {_port(host)} mtu {MTU} master {_BRIDGE} {quiet} up" for host in lab.hosts]
    _run(ip, "-n", _switch(lab.name), lines=["link set dev lo up", *ports, f"link set dev {_BRIDGE} {quiet} up"])
    for host in lab.hosts:
        subnet = host.address.rpartition(".")[0] + ".0/24"
        route = f"route replace {subnet} dev {host.interface} proto kernel scope link src {host.address}"
        _run(
            ip, "-n", host.namespace,
            lines=[
                "link set dev lo up",
                f"link set dev {host.interface} mtu {MTU} {quiet} up",
                f"address replace {host.address}/24 dev {host.interface}",
                f"{route} congctl {congestion}" if congestion else route,
            ],
        )  # fmt: skip


def _apply(hosts: Sequence[Host], shape: _Shape) -> None:
    tc = _tool("tc")
    for host in hosts:
        _run(tc, "-n", host.namespace, lines=[shape.on(host.interface)])
    switch = hosts[0].namespace.rpartition("-")[0] + "-sw"
    _run(tc, "-n", switch, lines=[shape.on(_port(host)) for host in hosts])


def _delete(name: str) -> None:
    if found := _namespaces(name):
        # -force goes on after a failure, so that one that cannot go does not keep the others.
        _run(_tool("ip"), "-force", lines=[f"netns delete {namespace}" for namespace in found])


def _host_status(
    host: Host,
    ports: dict[str, dict[str, Any]],
    port_shapers: dict[str, dict[str, Any]],
    inside: Sequence[Process],
) -> HostStatus:
    links = _links(host.namespace)
    near, far = links[host.interface], ports[_port(host)]
    sends, receives = _shapers(host.namespace).get(host.interface), port_shapers.get(_port(host))
    routes = _ask(_tool("ip"), "-j", "-n", host.namespace, "route", "show", "dev", host.interface)
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
    host: Host, links: dict[str, dict[str, Any]], far: dict[str, Any], rate: float | None, receive_rate: float | None
) -> Iterator[str]:
    near = links[host.interface]
    for interface in ("lo", host.interface):
        if "UP" not in links[interface]["flags"]:
            yield f"{interface} is down"
    if "UP" not in far["flags"] or far.get("master") != _BRIDGE:
        yield "its port of the switch is down or unplugged"
    if near["mtu"] != MTU or far["mtu"] != MTU:
        yield f"its MTU is {min(near['mtu'], far['mtu'])}"
    if all(address["local"] != host.address for address in near["addr_info"]):
        yield f"it has no address {host.address}"
    if rate != receive_rate:
        yield "it sends and receives at different rates"


@contextlib.contextmanager
def _exclusive(name: str) -> Iterator[None]:
    """One change of a lab at a time on this machine; the lock goes with its process, however that ends."""
    # An abstract address: no file, and no chance of a stale one.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as lock:
        deadline = time.monotonic() + 10
        while True:
            try:
                lock.bind(f"\0foretrain-lab-{name}")
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                if time.monotonic() > deadline:
                    raise LabError(f"another command is changing lab {name!r}; try again when it is done") from None
                time.sleep(0.02)
        yield
