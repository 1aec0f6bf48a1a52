"""Fidelity of a network simulation: ideal, as a fluid, or packet by packet.

| level  | what it knows |
|---|---|
| ideal  | dependencies, latency, the slowest link of each path; no contention |
| fluid  | besides, that flows share links, at once and fairly |
| packet | besides, packets, queues, marks, losses and the transport that reacts to them |
| auto   | packet where that takes no longer than a budget on this machine, else fluid |

Each costs more than the one before, and finds more time; where fluid and packet take longer than ideal, that is
contention. ``"auto"`` is decided for known work by `decided`, from the packets that cross links in the program and the
speed of this machine: measured, in a tenth of a second, on the first flows of the same program in the same network, so
that the size of the network counts, too. Repeated packets, and hosts that do nothing but wait, are not foreseen: expect
the half, or the double.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError
from foretrain.network.fluid import Fluid
from foretrain.network.fluid import run as run_fluid
from foretrain.network.packet import LinkLosses, Packets, Queues
from foretrain.network.packet.port_config import holding, usual
from foretrain.network.packet.transports.transport import Dctcp, Transport
from foretrain.network.program import NetworkSimulator, Paths, Program, ProgramHandle
from foretrain.network.topology.graph import Topology
from foretrain.units import MILLISECOND, Time


def run_ideal(program: Program, capacity: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return when each flow of ``program`` ends without contention, ps, float64 (flows,).

    Each flow gets a link of its own, as fast as the slowest of its path; ``capacity`` is in bytes/s, (links,).

    Raises:
        StallError: the program can never complete.
    """
    hops = np.diff(program.paths.first)
    slowest = np.full(len(program), np.inf)
    np.minimum.at(slowest, np.repeat(np.arange(len(program)), hops), capacity[program.paths.links])
    crossing = np.flatnonzero(hops > 0)
    first = np.zeros(len(program) + 1, np.int32)
    np.cumsum(hops > 0, out=first[1:])
    private = Paths(first, np.arange(len(crossing), dtype=np.int32))
    return run_fluid(
        dataclasses.replace(program, paths=private, priority=program.priority * 0), slowest[crossing]
    ).finish


class Ideal:
    """Network without contention, a `foretrain.network.program.NetworkSimulator`: each end is known at once.

    Args:
        capacity: bytes/s of each link, float64 (links,).
    """

    def __init__(self, capacity: NDArray[np.float64]) -> None:
        self._capacity = capacity
        self._now: Time = 0
        self._running: dict[int, ProgramHandle] = {}
        self._ends: list[tuple[Time, int]] = []
        self._next = 0

    @property
    def now(self) -> Time:
        """Return the present, ps."""
        return self._now

    @property
    def running(self) -> tuple[ProgramHandle, ...]:
        """Return the programs that have not completed, in the order of their addition."""
        return tuple(self._running.values())

    def add(self, program: Program, at: Time | None = None) -> ProgramHandle:
        """Start ``program`` now, or at ``at``, up to which time then passes first.

        Raises:
            StallError: it can never complete.
        """
        if at is not None:
            self.advance(at)
        handle = ProgramHandle(program, self._now, _index=self._next)
        self._next += 1
        if not len(program):
            handle.end = handle.added
            return handle
        releases = np.maximum(program.release, self._now) - self._now
        handle.finish = run_ideal(dataclasses.replace(program, release=releases), self._capacity) + self._now
        self._running[handle._index] = handle
        heapq.heappush(self._ends, (math.ceil(handle.finish.max()), handle._index))
        return handle

    def advance(self, until: Time | None = None, *, stop: bool = False) -> tuple[ProgramHandle, ...]:
        """Let time pass to ``until``, or until everything is done; return what completed, in order."""
        if until is not None and until < self._now:
            raise ConfigError("until", until, "is past", f"it is {self._now} ps now")
        if stop and (first := self.next_completion()) is not None and (until is None or first < until):
            until = first
        done: list[ProgramHandle] = []
        while self._ends and (until is None or self._ends[0][0] <= until):
            end, index = heapq.heappop(self._ends)
            if index in self._running:
                handle = self._running.pop(index)
                handle.end = self._now = end
                done.append(handle)
        self._now = self._now if until is None else until
        return tuple(done)

    def predict(self, handle: ProgramHandle) -> Time:
        """Return when ``handle`` completes, ps."""
        if handle.end is None:
            self._check(handle)
        return math.ceil(handle.finish.max()) if handle.end is None else handle.end

    def next_completion(self) -> Time | None:
        """Return when the next program completes, ps; None if none runs."""
        while self._ends and self._ends[0][1] not in self._running:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else None

    def cancel(self, handle: ProgramHandle) -> None:
        """Remove ``handle`` from the network, now."""
        self._check(handle)
        handle.cancelled = True
        del self._running[handle._index]

    def _check(self, handle: ProgramHandle) -> None:
        if self._running.get(handle._index) is not handle:
            state = "was cancelled" if handle.cancelled else "has completed or is of another network"
            raise ConfigError("handle", handle._index, state, "name a program that runs")


Level: TypeAlias = Literal["ideal", "fluid", "packet", "auto"]
USUAL: Final = Dctcp(least_timeout=MILLISECOND)
"""The transport where none is said: queues that drop nothing make round trips of 200 µs, which are no losses."""


@dataclass(frozen=True, slots=True)
class Fidelity:
    """A level, and the settings of the packet level.

    Attributes:
        level: see this module.
        transport: of all flows.
        switches: queues of what forwards; None for those that the transport is made for: see `usual`.
        budget: seconds that ``"auto"`` lets the packet level take.
        seed: of what is random among packets.
        losses: what wires lose, by ``"*"``, all that are up, or ``"leaf0:spine1"``, the links from one node to another;
            the last that is said of a wire holds.
    """

    level: Level = "fluid"
    transport: Transport = USUAL
    switches: Queues | None = None
    budget: float = 60.0
    seed: int = 0
    losses: tuple[tuple[str, LinkLosses], ...] = ()

    def __post_init__(self) -> None:
        if not self.budget >= 0:
            raise ConfigError("budget", self.budget, "is no number of seconds", "give 0 or more")

    def __str__(self) -> str:
        return f"packets ({type(self.transport).__name__.lower()})" if self.level == "packet" else self.level

    def packets(self, topology: Topology) -> Packets:
        """Return ``topology`` as a network of packets."""
        switches = self.switches or usual(topology, self.transport)
        hosts = holding(topology, self.transport)
        return Packets(
            topology,
            transport=self.transport,
            hosts=hosts,
            switches=switches,
            losses=self._lossy(topology),
            seed=self.seed,
        )

    def _lossy(self, topology: Topology) -> dict[int, LinkLosses]:
        """Return the losses by link; ConfigError where there is no such link."""
        found: dict[int, LinkLosses] = {}
        for where, what in self.losses:
            links = np.flatnonzero(topology.up) if where == "*" else topology.between(*where.split(":", 1))
            found |= dict.fromkeys(links.tolist(), what)
        return found

    def carrier(self, topology: Topology) -> NetworkSimulator:
        """Return ``topology`` as a network to which programs are added while time passes.

        Raises:
            ConfigError: the level is ``"auto"``, which somebody must have decided.
        """
        if self.level == "packet":
            return self.packets(topology).online()
        if self.level == "ideal":
            return Ideal(topology.capacity)
        self._check_decided()
        return Fluid(topology.capacity, name=topology.link_name)

    def finish(
        self, program: Program, topology: Topology, progress: Callable[[int, int], None] | None = None
    ) -> NDArray[np.float64]:
        """Return when each flow of ``program`` ends if it is alone on ``topology``, ps, float64 (flows,).

        Args:
            program: what is sent.
            topology: the network.
            progress: told now and then how much has come, of how much; only packets take long enough.

        Raises:
            ConfigError: the level is ``"auto"``; or as of `foretrain.network.packet.Packets.run`.
            StallError: the program can never complete.
        """
        if self.level == "packet":
            return self.packets(topology).run(program, progress=progress).finish.astype(np.float64)
        if self.level == "ideal":
            return run_ideal(program, topology.capacity)
        self._check_decided()
        return run_fluid(program, topology.capacity, name=topology.link_name).finish

    def _check_decided(self) -> None:
        if self.level == "auto":
            raise ConfigError("fidelity", "auto", "has not been decided", "see foretrain.network.fidelity.decided")


FLUID: Final = Fidelity()
"""Default fidelity."""


_PROBE: Final = 1 << 16
"""Packet hops of the measurement."""
_FLOWS: Final = 1 << 10
"""Flows of it at the most."""


@dataclass(frozen=True, slots=True)
class PacketEstimate:
    """Estimated work of a packet simulation.

    Attributes:
        hops: links that packets with data cross, all together.
        speed: of them in a second, on this machine.
    """

    hops: int
    speed: float

    @property
    def seconds(self) -> float:
        """Return the estimated run time."""
        return self.hops / self.speed if self.hops else 0.0

    def __str__(self) -> str:
        return f"{_count(self.hops)} packet hops, about {_duration(self.seconds)}"


@dataclass(frozen=True, slots=True)
class Decided:
    """Fidelity that was decided on, and the reason.

    Attributes:
        fidelity: never ``"auto"``.
        why: a line for a person, e.g. ``"packet level: 12.4 M packet hops, about 9 s"``.
    """

    fidelity: Fidelity
    why: str


def packet_hops(program: Program, payload: int) -> int:
    """Return the links that data packets of ``payload`` bytes cross to carry ``program``, if none is lost."""
    packets = np.ceil(np.maximum(program.size, 1.0) / payload) * program.steps
    return int(packets @ np.diff(program.paths.first))


def speed(fidelity: Fidelity, topology: Topology, program: Program) -> float:
    """Measure packet hops in a second on this machine, of ``fidelity``'s packets over paths of ``program``."""
    crossing = np.flatnonzero(np.diff(program.paths.first) > 0)[:_FLOWS]
    if not len(crossing):
        return 1e6
    paths = program.paths.gather(crossing)
    # Over wires that lose nothing: a dead one would be waited for.
    network, payload = dataclasses.replace(fidelity, losses=()).packets(topology), fidelity.transport.payload
    network.run(Program.of(paths.gather(np.zeros(1, np.int64)), np.ones(1)))  # compiles
    each = max(1, _PROBE // len(paths.links)) * payload
    begin = time.perf_counter()
    outcome = network.run(Program.of(paths, np.full(len(paths), float(each))))
    return outcome.data_hops / (time.perf_counter() - begin)


def estimate(fidelity: Fidelity, topology: Topology, programs: Iterable[Program], times: float = 1.0) -> PacketEstimate:
    """Estimate the packet simulation of ``programs`` one after the other, ``times`` times."""
    found = list(programs)
    hops = round(times * sum(packet_hops(program, fidelity.transport.payload) for program in found))
    largest = max(found, key=lambda program: program.size @ program.steps)
    return PacketEstimate(hops, speed(fidelity, topology, largest))


def decided(fidelity: Fidelity, topology: Topology, programs: Iterable[Program], times: float = 1.0) -> Decided:
    """Decide ``"auto"`` for ``programs`` that are simulated ``times`` times, by the time that `estimate` returns."""
    if fidelity.level in ("ideal", "fluid"):
        return Decided(fidelity, f"{fidelity.level} level")
    found = estimate(fidelity, topology, programs, times)
    if fidelity.level == "packet":
        return Decided(fidelity, f"packet level: {found}")
    budget = _duration(fidelity.budget)
    if found.seconds <= fidelity.budget:
        why = f"auto takes the packet level: {found}, within the budget of {budget}"
        return Decided(dataclasses.replace(fidelity, level="packet"), why)
    why = f"auto takes the fluid level: packets would be {found}, more than the budget of {budget}"
    return Decided(dataclasses.replace(fidelity, level="fluid"), why)


def parts(sizes: Sequence[int], told: Callable[[int, int], None]) -> Iterator[Callable[[int, int], None]]:
    """Yield a progress callback for each of several works of such ``sizes``; ``told`` is called with the whole."""
    whole = sum(sizes)
    for k, size in enumerate(sizes):
        before = sum(sizes[:k])
        yield lambda done, total, before=before, size=size: told(before + size * done // max(total, 1), whole)


def _count(number: int) -> str:
    for factor, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= factor:
            return f"{number / factor:.3g}{unit}"
    return str(number)


def _duration(seconds: float) -> str:
    if seconds < 1:
        return "a second" if seconds > 0 else "0 s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
