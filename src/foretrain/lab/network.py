"""Network of a lab: one namespace per host, one for the switch, shaped veth pairs between them.

    with Lab.up("mine", hosts=4, rate="1Gbps") as lab:
        lab.rate("500Mbps", host=2)
        print(lab.status().hosts[2].sent)

Each host has one interface of 9000 bytes MTU, an address in a /24 of its lab's own, and its own loopback. A token
bucket (tbf) on either end of its cable shapes what it sends and what it receives; a tree of queues (htb) where
`foretrain.lab.conditions` ask for bands or losses. Nothing is visible from the
machine's own network, and several labs stand side by side.

Note [The kernel keeps the state]: there is no file about labs. ``ip -j`` and ``tc -j`` read the state of a lab whenever
it is needed, so that a crash cannot leave a record that differs from the network.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from foretrain.errors import ConfigError
from foretrain.lab import iproute
from foretrain.lab.conditions import MTU, Conditions
from foretrain.lab.host import (
    BRIDGE,
    LabHost,
    Process,
    Status,
    background_of,
    checked_name,
    end,
    flows_of,
    hosts_of,
    index_of,
    inside,
    is_source,
    lab_of,
    port_of,
    senders,
    sources_of,
    start_senders,
    status_of,
    switch_of,
    uninterrupted,
)
from foretrain.lab.iproute import LabError
from foretrain.lab.port_programs import lose_bursts, mark_waiting, unmark
from foretrain.lab.port_queues import MARKED_FROM, NOWHERE, ROOT, Form, form, form_of, lines_of
from foretrain.units import MILLISECOND, SECOND, Time, parse_rate, parse_time

Congestion: TypeAlias = Literal["cubic", "bbr", "reno"]
"""TCP congestion control on the lab's routes; None leaves the machine's default."""
_OPENING = 60.0
"""Seconds that the kernel may take until new links carry packets."""

QUEUE: Time = 8 * MILLISECOND
_PLAIN = Conditions()
# Above a GSO packet (64 KiB), or tbf would cut each into segments and the CPU would become the bottleneck.
_LEAST_BURST = 96 * 2**10
_LEAST_LIMIT = 512 * 2**10
_SEGMENTS = 65535
"""Of a packet that the kernel cuts late, by default."""
_SLOWEST, _FASTEST = 125_000.0, 1.25e11  # 1 Mbps: there _LEAST_BURST is 0.8 s already; 1 Tbps: no machine's memory

_log = logging.getLogger(__name__)


class Lab:
    """Existing lab. Made by `up`, found by `find`; as a context manager it is removed at the end of the block.

    Exceptions and Ctrl-C end the block too, and SIGTERM where the ``foretrain`` command runs. After SIGKILL the next
    `up` of that name takes the lab over, or `remove` removes it.

    Attributes:
        name: unique on this machine.
        hosts: in the order of their indices.
    """

    def __init__(self, name: str, hosts: int) -> None:
        self.name, self.hosts = name, hosts_of(name, hosts)

    @classmethod
    def up(
        cls,
        name: str = "lab",
        hosts: int = 2,
        rate: str | float | None = None,
        *,
        queue: str | Time = QUEUE,
        congestion: Congestion | None = None,
        conditions: Conditions = _PLAIN,
    ) -> Lab:
        """Build a lab, or change the one of that name accordingly.

        A lab whose namespaces and cables are right is repaired and shaped in place, and processes inside go on. Any
        other (another number of hosts, half built, half removed) is removed and rebuilt. When that fails, nothing is
        left behind. About 0.1 s for 4 hosts.

        Args:
            name: lower-case letters, digits and hyphens.
            hosts: 1 to 64.
            rate: of every host's link, each way: text such as "1Gbps", bytes per second, or None or "none".
            queue: size of the queue in front of a link, as time at its rate; 512 KiB at least.
            congestion: TCP congestion control of the hosts.
            conditions: bands, selective drop, losses and background flows; they need a rate. Background flows end with
                the lab, and where it is used as a context manager, with this process too.

        Raises:
            ConfigError: an argument is wrong.
            LabError: no root, no iproute2, the kernel refuses, or processes are in a lab that must be rebuilt.
        """
        lab = cls(checked_name(name), hosts)
        shape = _Shape.of(rate, queue, conditions)
        if conditions.lossy_host is not None:
            lab.host(conditions.lossy_host)
        iproute.require()
        with _exclusive(name):
            built = False
            try:
                _end_flows(name)
                if _broken(lab):
                    _refuse_busy(lab)
                    built = True
                    _delete(name)
                    _create(lab)
                _configure(name, lab.hosts, congestion, one_by_one=not conditions.plain)
                _note(name, conditions)
                _apply(lab.hosts, shape)
                _await_links(name, lab.hosts)
                if conditions.background:
                    _plug(name, sources_of(name))
                    _configure(name, sources_of(name), None, one_by_one=True)
                    lab._start_flows(shape, owner=0)
            except BaseException:
                with uninterrupted():
                    _end_flows(name)
                    if built:
                        _delete(name)
                raise
        return lab

    def _start_flows(self, shape: _Shape, owner: int) -> None:
        assert shape.rate is not None
        target = self._congested(shape.conditions)
        start_senders(self.name, target, shape.conditions.background * shape.rate, owner)

    def _congested(self, conditions: Conditions) -> LabHost:
        """Return the host whose port background flows congest."""
        return self.hosts[-1 if conditions.lossy_host is None else conditions.lossy_host]

    @classmethod
    def find(cls, name: str = "lab") -> Lab:
        """Return the lab of that name; raise LabError when there is none, or when it is only half there."""
        iproute.require()
        found = _namespaces(checked_name(name))
        if not found:
            known = ", ".join(labs()) or "none"
            raise LabError(
                f"there is no lab {name!r} (known: {known}); build it: foretrain lab up --name {name} --hosts 4"
            )
        lab = cls(name, max((index_of(namespace) or 0 for namespace in found), default=0) + 1)
        if fault := _broken(lab):
            raise LabError(
                f"lab {name!r} is only half there ({fault}); build it anew: foretrain lab up --name {name}, "
                f"or remove it: foretrain lab down --name {name}"
            )
        return lab

    def rate(self, rate: str | float | None, host: int | None = None, *, queue: str | Time = QUEUE) -> None:
        """Change the rate of the link of ``host``, or of all, in both directions, while connections go on.

        Conditions stay. Background flows take the same share of the new rate, where it is their port's. Queues with
        conditions are built anew: packets that wait there are lost, and counters begin at 0.

        Raises:
            ConfigError: an argument is wrong, or there are conditions, which need a rate, and ``rate`` is none.
        """
        _Shape.of(rate, queue, _PLAIN)
        iproute.require()
        with _exclusive(self.name):
            conditions = _noted(self.name)
            shape = _Shape.of(rate, queue, conditions)
            changed = self.hosts if host is None else (self.host(host),)
            _apply(changed, shape)
            if conditions.background and self._congested(conditions) in changed:
                flows = flows_of(_namespaces(self.name))
                end(lambda: senders(_namespaces(self.name)))
                self._start_flows(shape, flows[0].owner if flows else 0)

    def host(self, index: int) -> LabHost:
        """Return the host of that index; raise ConfigError when there is none."""
        if not 0 <= index < len(self.hosts):
            raise ConfigError("host", index, f"is not in lab {self.name!r}", f"choose 0 to {len(self.hosts) - 1}")
        return self.hosts[index]

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the arguments that run ``command`` inside a host."""
        return [iproute.tool("ip"), "netns", "exec", self.host(host).namespace, *command]

    def status(self) -> Status:
        """Return the present state in the kernel; raise LabError when the lab is gone or only half there."""
        found = Lab.find(self.name)
        space = switch_of(self.name)
        switch = iproute.links(space), iproute.shapers(space)
        inside = processes(self.name)
        background = background_of(self.name, _namespaces(self.name), switch[0])
        hosts = tuple(status_of(host, *switch, inside) for host in found.hosts)
        queues: Form | None = next((form_of(shaper["leaves"]) for shaper in switch[1].values()), None)
        return Status(self.name, hosts, _noted(self.name), background, queues)

    def down(self, *, kill: bool = False) -> tuple[Process, ...]:
        """Remove this lab; see `remove`."""
        return remove(self.name, kill=kill)

    def __enter__(self) -> Lab:
        try:
            self._own_flows()
        except BaseException:
            # A signal may come here, and then nobody calls __exit__.
            self.__exit__()
            raise
        return self

    def _own_flows(self) -> None:
        """Let background flows end with this process."""
        if flows := flows_of(_namespaces(self.name)):
            with _exclusive(self.name):
                end(lambda: senders(_namespaces(self.name)))
                total = flows[0].rate * len(sources_of(self.name))
                start_senders(self.name, self.hosts[flows[0].host], total, owner=os.getpid())

    def __exit__(self, *_: object) -> None:
        for process in self.down():
            _log.warning("lab %s is removed, but process %d lives on: %s", self.name, process.pid, process.command)


def labs() -> tuple[str, ...]:
    """Return the names of all labs of this machine, complete or not."""
    iproute.require()
    return tuple(sorted({name for name in map(lab_of, iproute.namespaces()) if name}))


def remove(name: str = "lab", *, kill: bool = False) -> tuple[Process, ...]:
    """Remove all namespaces with the lab's prefix; their absence is no error.

    Returns:
        The processes inside that go on, now without a network. With ``kill`` they are ended first (SIGTERM, after
        three seconds SIGKILL), and only survivors are returned.
    """
    checked_name(name)
    iproute.require()
    with _exclusive(name), uninterrupted():
        alive = processes(name)
        if any(process.pid == os.getpid() for process in alive):
            raise LabError(f"this runs inside lab {name!r}; remove it from outside")
        if kill:
            end(lambda: processes(name))
            alive = processes(name)
        _end_flows(name)
        _delete(name)
    return alive


def processes(name: str) -> tuple[Process, ...]:
    """Return the processes inside a lab, by pid, without senders of background flows."""
    return inside({namespace: index_of(namespace) for namespace in _namespaces(name) if not is_source(namespace)})


@dataclass(frozen=True, slots=True)
class _Shape:
    """Shape of a link: ``rate`` in bytes per second, None for no shaping; ``burst`` and ``limit`` in bytes."""

    rate: float | None
    burst: int = 0
    limit: int = 0
    conditions: Conditions = _PLAIN

    @classmethod
    def of(cls, rate: str | float | None, queue: str | Time, conditions: Conditions) -> _Shape:
        speed = parse_rate(rate) if isinstance(rate, str) and rate != "none" else rate
        delay = parse_time(queue, "queue") if isinstance(queue, str) else queue
        if speed is None or isinstance(speed, str):
            if not conditions.plain:
                remedy = "write a rate, e.g. '1Gbps', or build the lab without them: foretrain lab up"
                raise ConfigError("rate", rate, "has no queues, for bands, losses or background flows", remedy)
            return cls(None)
        if not _SLOWEST <= speed <= _FASTEST:
            raise ConfigError("rate", rate, "is not between 1Mbps and 1Tbps", "write e.g. '1Gbps', or 'none'")
        limit = max(_LEAST_LIMIT, math.ceil(speed * delay / SECOND))
        if delay <= 0 or limit >= 2**31:
            raise ConfigError("queue", queue, "is not above 0 and below 2 GiB at this rate", "write e.g. '8ms'")
        return cls(speed, max(_LEAST_BURST, math.ceil(speed / 1000)), limit, conditions)

    def on(self, interface: str, host: int | None = None) -> list[str]:
        """Return the lines for ``tc -batch`` for a host's interface, or for the switch's port to ``host``."""
        if self.rate is None:
            return [f"qdisc replace dev {interface} root noqueue"]
        if not self.conditions.plain:
            size = (self.rate, self.burst, self.limit)
            return lines_of(self.conditions, interface, *size, host=host, form=form())
        bits = round(self.rate * 8)
        shape = f"tbf rate {bits}bit burst {self.burst} limit {self.limit}"
        return [f"qdisc replace dev {interface} root handle 1: {shape}"]


def _namespaces(name: str) -> list[str]:
    return [namespace for namespace in iproute.namespaces() if lab_of(namespace) == name]


def _broken(lab: Lab) -> str | None:
    """Return the fault of a lab's namespaces and cables, which needs a rebuild; None when they are complete."""
    found = {namespace for namespace in _namespaces(lab.name) if not is_source(namespace)}
    wanted = {switch_of(lab.name), *(host.namespace for host in lab.hosts)}
    if found != wanted:
        return f"{'missing' if found < wanted else 'unexpected'}: {', '.join(sorted(found ^ wanted))}"
    try:
        ports = iproute.links(switch_of(lab.name))
        if BRIDGE not in ports:
            return "the switch has no bridge"
        for host in lab.hosts:
            near, far = iproute.links(host.namespace).get(host.interface), ports.get(port_of(host))
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
    switch = switch_of(lab.name)
    iproute.run(iproute.tool("ip"), lines=[f"netns add {switch}"])
    iproute.run(iproute.tool("ip"), "-n", switch, lines=[f"link add name {BRIDGE} type bridge mcast_snooping 0"])
    _plug(lab.name, lab.hosts)


def _plug(name: str, hosts: Sequence[LabHost]) -> None:
    """Make the namespaces of ``hosts``, and their cables to the switch."""
    # Cables are born inside the namespaces: nothing ever shows up in the machine's own network.
    cables = [
        f"link add name {host.interface} netns {host.namespace} type veth peer name {port_of(host)} "
        f"netns {switch_of(name)}"
        for host in hosts
    ]
    iproute.run(iproute.tool("ip"), lines=[*(f"netns add {host.namespace}" for host in hosts), *cables])


def _configure(name: str, hosts: Sequence[LabHost], congestion: Congestion | None, *, one_by_one: bool) -> None:
    """Set addresses, MTU and routes; every line may be repeated, which repairs manual changes."""
    segments = 1 if one_by_one else _SEGMENTS
    # Without IPv6 addresses there are no router solicitations, which the counters would count.
    quiet = "addrgenmode none" if Path("/proc/net/if_inet6").exists() else ""
    ip = iproute.tool("ip")
    ports = [f"link set dev {port_of(host)} mtu {MTU} master {BRIDGE} {quiet} up" for host in hosts]
    iproute.run(ip, "-n", switch_of(name), lines=["link set dev lo up", *ports, f"link set dev {BRIDGE} {quiet} up"])
    for host in hosts:
        subnet = host.address.rpartition(".")[0] + ".0/24"
        route = f"route replace {subnet} dev {host.interface} proto kernel scope link src {host.address}"
        iproute.run(
            ip, "-n", host.namespace,
            lines=[
                "link set dev lo up",
                f"link set dev {host.interface} mtu {MTU} gso_max_segs {segments} {quiet} up",
                f"address replace {host.address}/24 dev {host.interface}",
                f"{route} congctl {congestion}" if congestion else route,
            ],
        )  # fmt: skip


def _note(name: str, conditions: Conditions) -> None:
    """Let the kernel keep the conditions of a lab."""
    ip = iproute.tool("ip")
    iproute.run(ip, "-n", switch_of(name), "link", "set", "dev", BRIDGE, "alias", conditions.written())


def _noted(name: str) -> Conditions:
    """Return the conditions that `_note` has kept."""
    return Conditions.read(iproute.alias(switch_of(name), BRIDGE))


def _apply(hosts: Sequence[LabHost], shape: _Shape) -> None:
    tc = iproute.tool("tc")
    for host in hosts:
        iproute.run(tc, "-n", host.namespace, lines=shape.on(host.interface))
    switch = hosts[0].namespace.rpartition("-")[0] + "-sw"
    lines = [line for host in hosts for line in shape.on(port_of(host), host.index)]
    iproute.run(tc, "-n", switch, lines=lines)
    conditions = shape.conditions
    for host in hosts:
        unmark(host.namespace, host.interface)
        if conditions.drop == "selective" and shape.rate and form() == "htb":
            longest = round(shape.limit / shape.rate * MARKED_FROM * 1e9)
            # A kernel without eBPF marks nothing.
            with contextlib.suppress(LabError):
                mark_waiting(switch, port_of(host), ROOT, host.namespace, host.interface, longest)
        if conditions.burst > 1 and conditions.loses(host.index):
            lose_bursts(switch, port_of(host), ROOT, NOWHERE, conditions.loss, conditions.burst)


def _await_links(name: str, hosts: Sequence[LabHost]) -> None:
    """Wait until all links carry packets: a thread of the kernel opens them, and what is sent before that is lost."""
    deadline = time.monotonic() + _OPENING
    closed = {host.namespace: {host.interface} for host in hosts} | {switch_of(name): set(map(port_of, hosts))}
    while closed:
        for namespace, interfaces in tuple(closed.items()):
            links = iproute.links(namespace)
            if all(links[interface]["operstate"] == "UP" for interface in interfaces):
                del closed[namespace]
            elif time.monotonic() > deadline:
                raise LabError(f"links of {namespace} do not open within {_OPENING:g} s; see: foretrain lab status")
        time.sleep(0.01 * bool(closed))


def _delete(name: str) -> None:
    _delete_all(_namespaces(name))


def _delete_all(namespaces: Sequence[str]) -> None:
    if namespaces:
        # -force goes on after a failure.
        iproute.run(iproute.tool("ip"), "-force", lines=[f"netns delete {namespace}" for namespace in namespaces])


def _end_flows(name: str) -> None:
    """End a lab's background flows, and remove their sources."""
    if sources := [namespace for namespace in _namespaces(name) if is_source(namespace)]:
        end(lambda: senders(sources))
        # The kernel removes a namespace some time later, and its cables with it.
        cables = [f"link delete {port_of(source)}" for source in sources_of(name)]
        with contextlib.suppress(LabError):
            iproute.run(iproute.tool("ip"), "-force", "-n", switch_of(name), lines=cables)
        _delete_all(sources)


@contextlib.contextmanager
def _exclusive(name: str) -> Iterator[None]:
    """Hold this machine's lock on changes of a lab, which ends with its process."""
    # An abstract address: no file, and so no stale one.
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
