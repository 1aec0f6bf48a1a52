"""How long the packet level will take, before it starts.

Packets that cross links are counted from the program; how many this machine does in a second is measured, in a tenth of
a second, on the first flows of the same program in the same network, so that the size of the network counts, too. What
is sent again, and hosts that do nothing but wait, are not foreseen: expect the half, or the double.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from foretrain.network.fidelity import Fidelity
from foretrain.network.program import Program
from foretrain.network.topology.graph import Topology

_PROBE: Final = 1 << 16
"""Packet hops of the measurement."""
_FLOWS: Final = 1 << 10
"""Flows of it at the most."""


@dataclass(frozen=True, slots=True)
class PacketEstimate:
    """What the packet level has to do.

    Attributes:
        hops: links that packets with data cross, all together.
        speed: of them in a second, on this machine.
    """

    hops: int
    speed: float

    @property
    def seconds(self) -> float:
        """How long that takes."""
        return self.hops / self.speed if self.hops else 0.0

    def __str__(self) -> str:
        return f"{_count(self.hops)} packet hops, about {_duration(self.seconds)}"


@dataclass(frozen=True, slots=True)
class Decided:
    """What is simulated, and why.

    Attributes:
        fidelity: never ``"auto"``.
        why: a line for a person, e.g. ``"packet level: 12.4 M packet hops, about 9 s"``.
    """

    fidelity: Fidelity
    why: str


def packet_hops(program: Program, payload: int) -> int:
    """Links that data packets of ``payload`` bytes cross to carry ``program``, if none is lost."""
    packets = np.ceil(np.maximum(program.size, 1.0) / payload) * program.steps
    return int(packets @ np.diff(program.paths.first))


def speed(fidelity: Fidelity, topology: Topology, program: Program) -> float:
    """Packet hops in a second on this machine, of ``fidelity``'s packets in ``topology`` over paths of ``program``."""
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
    """Of carrying ``programs`` one after the other, ``times`` times."""
    found = list(programs)
    hops = round(times * sum(packet_hops(program, fidelity.transport.payload) for program in found))
    largest = max(found, key=lambda program: program.size @ program.steps)
    return PacketEstimate(hops, speed(fidelity, topology, largest))


def decided(fidelity: Fidelity, topology: Topology, programs: Iterable[Program], times: float = 1.0) -> Decided:
    """What ``fidelity`` means for ``programs``, carried ``times`` times; `estimate` says how long that takes."""
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
    """For each of several works of such ``sizes`` whom to tell how far it is; ``told`` hears it of the whole."""
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
