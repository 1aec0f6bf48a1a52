"""Hosts of a lab: their names, their state in the kernel, and the processes inside.

Namespaces are ``ft-<lab>-sw`` and ``ft-<lab>-h<i>``, interfaces ``fth<i>`` at the host and ``ftp<i>`` at the switch,
whose bridge is ``ftbr``. Sources of background flows are ``ft-<lab>-b<i>``, hosts with indices from 100.

Background flows come from hosts of their own that send bursts to one host, and so fill the queue of its port. Their
datagrams go to an address that the receiving host discards: it needs no process for them, and answers nothing. They are
not marked, which makes them the last band's. The kernel keeps their state, as all of a lab's: sources are namespaces,
and the command of each sender says what it sends.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from foretrain.errors import ConfigError
from foretrain.lab import iproute
from foretrain.lab.conditions import MTU, Conditions
from foretrain.lab.iproute import LabError
from foretrain.lab.port_programs import marked
from foretrain.lab.port_queues import BandStatus, Form, bands_of, lost_of
from foretrain.units import NANOSECOND, SECOND, Time

MOST_HOSTS = 64
SOURCES = 4
"""Hosts that send background flows, where there are any."""
_FIRST_SOURCE = 100
BRIDGE = "ftbr"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")


@dataclass(frozen=True, slots=True)
class LabHost:
    """Host of a lab: ``interface`` with the IPv4 ``address`` is its only one besides loopback."""

    index: int
    namespace: str
    interface: str
    address: str


@dataclass(frozen=True, slots=True)
class HostStatus:
    """State of a host in the kernel.

    Attributes:
        rate: bytes per second that it may send; None is unshaped.
        receive_rate: bytes per second that the switch sends to it; None is unshaped.
        queue: time that a full queue takes to drain; None is unshaped.
        congestion: congestion control of its route; None is the machine's default.
        sent: bytes since it was built, with TCP/IP and Ethernet headers.
        received: likewise.
        dropped: packets that found a queue full, in either direction, since it was shaped.
        lost: packets to it that were lost at random.
        bands: queues of the switch's port to it, where there are bands.
        processes: those inside.
        faults: differences from the state that `Lab.up` leaves, and repairs if it is called again.
    """

    host: LabHost
    rate: float | None
    receive_rate: float | None
    queue: Time | None
    congestion: str | None
    sent: int
    received: int
    dropped: int
    lost: int
    bands: tuple[BandStatus, ...]
    processes: tuple[Process, ...]
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BackgroundStatus:
    """State of a lab's background flows.

    Attributes:
        host: index of the host that they go to; None if no sender lives.
        rate: bytes/s of all senders together.
        senders: how many live.
        sources: how many there should be.
        sent: bytes of all sources since they were built.
    """

    host: int | None
    rate: float
    senders: int
    sources: int
    sent: int


@dataclass(frozen=True, slots=True)
class Status:
    """State of a lab in the kernel.

    Attributes:
        name: of the lab.
        hosts: of each host.
        conditions: of its links.
        background: None where no background flows were asked for.
        queues: form of its trees of queues; None where links only have a rate.
    """

    name: str
    hosts: tuple[HostStatus, ...]
    conditions: Conditions
    background: BackgroundStatus | None = None
    queues: Form | None = None


def checked_name(name: str) -> str:
    """Return ``name``; raise ConfigError where a lab cannot have it."""
    if not _NAME.fullmatch(name):
        raise ConfigError("name", name, "is not a name for a lab", "use up to 31 of a-z, 0-9 and hyphens")
    return name


def hosts_of(name: str, count: int) -> tuple[LabHost, ...]:
    """Return the ``count`` hosts of lab ``name``; raise ConfigError where they are too many."""
    if not 1 <= count <= MOST_HOSTS:
        raise ConfigError("hosts", count, "is out of range", f"choose 1 to {MOST_HOSTS}")
    return tuple(LabHost(i, f"ft-{name}-h{i}", f"fth{i}", _address(name, i)) for i in range(count))


def sources_of(name: str) -> tuple[LabHost, ...]:
    """Return the hosts of lab ``name`` that send its background flows."""
    numbers = range(_FIRST_SOURCE, _FIRST_SOURCE + SOURCES)
    return tuple(LabHost(i, f"ft-{name}-b{i - _FIRST_SOURCE}", f"fth{i}", _address(name, i)) for i in numbers)


def _address(name: str, index: int) -> str:
    # Labs cannot see each other, so two with the same subnet are fine.
    return f"10.77.{zlib.crc32(name.encode()) % 256}.{index + 1}"


def switch_of(name: str) -> str:
    """Return the namespace of the switch of lab ``name``."""
    return f"ft-{name}-sw"


def port_of(host: LabHost) -> str:
    """Return the interface at the switch that is connected to ``host``."""
    return f"ftp{host.index}"


def index_of(namespace: str) -> int | None:
    """Return the index of the host of a namespace; None is the switch, or a source of background flows."""
    role = namespace.rpartition("-")[2]
    return int(role[1:]) if role.startswith("h") else None


def is_source(namespace: str) -> bool:
    """Return whether a lab's namespace is a source of background flows."""
    return namespace.rpartition("-")[2].startswith("b")


def lab_of(namespace: str) -> str | None:
    """Return the name of the lab of a namespace; None if it is of none."""
    match = re.fullmatch(r"ft-(.+)-(?:sw|[hb]\d+)", namespace)
    return match[1] if match and _NAME.fullmatch(match[1]) else None


def status_of(
    host: LabHost,
    ports: dict[str, dict[str, Any]],
    port_shapers: dict[str, dict[str, Any]],
    inside: Sequence[Process],
) -> HostStatus:
    """Return the state of ``host`` in the kernel, given the switch's interfaces and shapers and the lab's processes."""
    links = iproute.links(host.namespace)
    near, far = links[host.interface], ports[port_of(host)]
    sends, receives = iproute.shapers(host.namespace).get(host.interface), port_shapers.get(port_of(host))
    leaves = receives["leaves"] if receives else {}
    routes = iproute.routes(host.namespace, host.interface)
    controls = [
        metric["congestion"] for route in routes for metric in route.get("metrics", ()) if "congestion" in metric
    ]
    rate, receive_rate = _rate(sends), _rate(receives)
    return HostStatus(
        host,
        rate,
        receive_rate,
        round(sends["limit"] / rate * SECOND) if sends and rate else None,
        controls[0] if controls else None,
        near["stats64"]["tx"]["bytes"],
        near["stats64"]["rx"]["bytes"],
        sum(shaper["drops"] for shaper in (sends, receives) if shaper),
        lost_of(leaves),
        bands_of(leaves, marked(host.namespace, host.interface) if leaves else None),
        tuple(process for process in inside if process.host == host.index),
        tuple(_faults(host, links, far, rate, receive_rate)),
    )


def _rate(shaper: dict[str, Any] | None) -> float | None:
    return shaper["rate"] if shaper else None


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


NAMESPACES = Path("/run/netns")


@dataclass(frozen=True, slots=True)
class Process:
    """Process inside a lab; ``host`` is None on the switch."""

    pid: int
    command: str
    host: int | None


@contextlib.contextmanager
def on_core(place: int, cores: int | None) -> Iterator[None]:
    """Start processes inside the block on one of the first ``cores`` cores that this thread may use, in turn by place.

    ``None`` leaves all cores to them.
    """
    allowed = os.sched_getaffinity(0)
    if cores is not None:
        os.sched_setaffinity(0, {sorted(allowed)[place % cores]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def cpu_time(pids: Iterable[int]) -> Time:
    """Return the CPU time of processes, threads that have ended included, ps."""
    # The clock's number is that of clock_getcpuclockid(3), which Python does not offer.
    return sum(time.clock_gettime_ns(~pid << 3 | 2) for pid in pids) * NANOSECOND


class CoreTime:
    """CPU time of processes, and the time for which their threads were ready to run and had no core.

    A kernel without scheduler statistics says nothing of either.

    Args:
        pids: of each host's processes.
    """

    def __init__(self, pids: Sequence[Sequence[int]]) -> None:
        self._pids = pids
        self._before = self._read()

    def passed(self) -> tuple[tuple[Time, Time], ...]:
        """Return the two times of each host, all threads together, since the construction, ps."""
        return tuple(
            ((busy - before[0]) * NANOSECOND, (waiting - before[1]) * NANOSECOND)
            for (busy, waiting), before in zip(self._read(), self._before, strict=True)
        )

    def _read(self) -> list[tuple[int, int]]:
        found = []
        for pids in self._pids:
            busy = waiting = 0
            for task in (task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()):
                with contextlib.suppress(OSError):  # a thread that has ended
                    times = (task / "schedstat").read_text(encoding="ascii").split()
                    busy, waiting = busy + int(times[0]), waiting + int(times[1])
            found.append((busy, waiting))
        return found


def thread_times(prefix: str) -> dict[str, Time]:
    """Return the CPU time of those of this process's threads whose names start with ``prefix``, by name, ps.

    Nothing where the kernel has no scheduler statistics.
    """
    found: dict[str, Time] = {}
    for thread in threading.enumerate():
        if thread.name.startswith(prefix):
            with contextlib.suppress(OSError):  # it has ended
                text = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text(encoding="ascii")
                found[thread.name] = int(text.split()[0]) * NANOSECOND
    return found


def inside(namespaces: Mapping[str, int | None]) -> tuple[Process, ...]:
    """Return the processes inside ``namespaces``, names with the index of their host, by pid, from /proc."""
    inodes: dict[tuple[int, int], int | None] = {}
    for namespace, host in namespaces.items():
        with contextlib.suppress(OSError):
            found = (NAMESPACES / namespace).stat()
            inodes[found.st_dev, found.st_ino] = host
    alive: list[Process] = []
    for entry in os.scandir("/proc") if inodes else ():
        if entry.name.isdigit():
            # A process may end between any two looks at it.
            with contextlib.suppress(OSError):
                seen = os.stat(f"{entry.path}/ns/net")
                if (seen.st_dev, seen.st_ino) in inodes:
                    words = Path(entry.path, "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ")
                    command = words.decode(errors="replace")
                    alive.append(Process(int(entry.name), command, inodes[seen.st_dev, seen.st_ino]))
    return tuple(sorted(alive, key=lambda process: process.pid))


def end(find: Callable[[], Iterable[Process]], timeout: float = 3.0) -> None:
    """End the processes that ``find`` returns: SIGTERM, and after ``timeout`` seconds SIGKILL.

    A pidfd of each is opened before a second call of ``find`` confirms it, so that a pid which the system has reused
    meanwhile is never signalled.
    """
    # A later round finds children that were forked between two; no signal ends a process that survives three.
    for _ in range(3):
        if not (found := tuple(find())):
            return
        held: dict[int, int] = {}
        try:
            for process in found:
                with contextlib.suppress(ProcessLookupError):
                    held[process.pid] = os.pidfd_open(process.pid)
            waiting = {held[process.pid] for process in find() if process.pid in held}
            for number in (signal.SIGTERM, signal.SIGKILL):
                for descriptor in waiting:
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(descriptor, number)
                waiting = _not_ended(waiting, timeout)
        finally:
            for descriptor in held.values():
                os.close(descriptor)


def _not_ended(descriptors: set[int], timeout: float) -> set[int]:
    waiting, deadline = set(descriptors), time.monotonic() + timeout
    poll = select.poll()
    for descriptor in waiting:
        poll.register(descriptor, select.POLLIN)
    while waiting and (left := deadline - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(math.ceil(left * 1000)):
            poll.unregister(descriptor)
            waiting.discard(descriptor)
    return waiting


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C and SIGTERM to the end of the block, so that clean-up is complete. On the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    for number in received[:1]:
        signal.raise_signal(number)


_SENDER = Path(__file__).with_name("sender.py")
_DISCARD = 254
"""Last number of the address that hosts discard."""


def senders(namespaces: Iterable[str]) -> tuple[Process, ...]:
    """Return the processes on the sources among ``namespaces``."""
    return inside({namespace: None for namespace in namespaces if is_source(namespace)})


class SenderFlow(NamedTuple):
    """Living sender of background flows.

    Attributes:
        host: index of the host that it sends to.
        rate: bytes/s.
        owner: process with which it ends; 0 is nobody.
    """

    host: int
    rate: float
    owner: int


def flows_of(namespaces: Iterable[str]) -> list[SenderFlow]:
    """Return what the living senders on the sources among ``namespaces`` do."""
    commands = [process.command.split() for process in senders(namespaces)]
    return [SenderFlow(int(words[-3]), float(words[-2]), int(words[-1])) for words in commands if str(_SENDER) in words]


def start_senders(name: str, target: LabHost, rate: float, owner: int) -> None:
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
    flows = flows_of(source.namespace for source in sources)
    sent = sum(ports[port_of(source)]["stats64"]["rx"]["bytes"] for source in sources if port_of(source) in ports)
    host = flows[0].host if flows else None
    return BackgroundStatus(host, sum(flow.rate for flow in flows), len(flows), len(sources_of(name)), sent)
