"""Algorithms and protocols of NCCL, and their times: inside one server fitted, between servers by the same formulas.

Between servers a hop has NCCL's constant for its latency, and a server's NICs are a second limit of the rate.

NCCL picks the protocol with the least ``latency + size / bandwidth`` by constants that are compiled in
(``ncclTopoTuneModel`` in its src/graph/tuning.cc, here as of 2.27, on NVLink). The constants are not measurements:
on an A100, two ranks gather 1 MiB in 20 µs by LL, and 2 MiB in 38 µs by Simple, because NCCL believes that LL were
slower from 1.3 MB on. A forecast must leave LL and LL128 where NCCL leaves them (`offered`), or it misses the step.
Only facts are taken from there, and only for one server. What is left out: trees, which this estimate never prefers
inside a server, its correction of trees by size, and user settings.

The ring's base and hop latencies in microseconds are NCCL's for NVLink; the rates are in `Generation.estimated_rate`
and its neighbours. That of NVLS is not NCCL's but such that NVLS begins at the rank counts where it is measured to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from foretrain.collective.nccl.generation import Generation, ProtocolCurve
from foretrain.collective.plan import Operation
from foretrain.units import MICROSECOND, SECOND, Time

ROUNDS: dict[Operation, int] = {
    "all_reduce": 2,
    "reduce_scatter": 1,
    "all_gather": 1,
    "all_to_all": 1,
}
"""Number of times that all but one of a rank's N blocks must cross its link; a broadcast moves all N, once."""


def bus_factor(operation: Operation, ranks: int) -> float:
    """Return the bytes that must leave a rank, per byte of size: 2(N−1)/N, (N−1)/N, or 1 for a broadcast."""
    return ROUNDS[operation] * (ranks - 1) / ranks if operation in ROUNDS else 1.0


def bus_bandwidth(operation: Operation, size: int, ranks: int, time: Time) -> float:
    """Return the bus bandwidth, bytes/s, as nccl-tests defines it: the rate of the links, whatever the rank count."""
    return bus_factor(operation, ranks) * size * SECOND / time


Protocol: TypeAlias = Literal["LL", "LL128", "Simple"]
"""LL sends 4 bytes of data with each 4 of flag, LL128 120 of 128, Simple whole chunks with one flag each."""


BASE: dict[Protocol, float] = {"LL": 6.6, "LL128": 14.0, "Simple": 8.4}


HOP: dict[Protocol, float] = {"LL": 0.6, "LL128": 1.9, "Simple": 3.4}


NVLS_LATENCY = 25.0
"""Microseconds; the fit takes no less, or NVLS would seem fit for the smallest sizes."""


NVLS_FACTOR = 5 / 6
"""Of the bus bandwidth, what NVLS gets."""


LL128_PAYLOAD = 0.92


LL_PAYLOAD = 0.5


def offered(
    operation: Operation, size: int, ranks: int, generation: Generation, *, nvls: bool = False, part: float = 1.0
) -> tuple[Protocol, ...]:
    """Return the protocols that NCCL would still use at ``size`` in one server, the lightest first.

    A light protocol is out once a heavier one is estimated faster, and stays out, as the heavier has more bandwidth.
    Where the switch can reduce (``nvls``) its estimate is always ahead of LL128 and of the ring's Simple; what is left
    is LL, for a time, and Simple, which then means NVLS. ``part`` of the generation's link is what the product has.
    """
    steps = ROUNDS.get(operation, 1) * (ranks - 1)
    bus = generation.estimated_rate * part
    rates: dict[Protocol, float] = {
        "LL": min(generation.estimated_ll, bus * LL_PAYLOAD),
        "LL128": min(generation.estimated_ll128, bus * LL128_PAYLOAD),
        "Simple": bus,
    }
    time: dict[Protocol, float] = {
        protocol: (BASE[protocol] + HOP[protocol] * steps) * MICROSECOND + size * steps / ranks / rate * SECOND
        for protocol, rate in rates.items()
    }
    if nvls:
        by_switch = NVLS_LATENCY * MICROSECOND + size / (generation.estimated_nvls * part * NVLS_FACTOR) * SECOND
        return ("LL", "Simple") if time["LL"] < by_switch else ("Simple",)
    if not generation.has_ll128:
        del time["LL128"]
    order = tuple(time)
    return tuple(p for i, p in enumerate(order) if all(time[p] < time[other] for other in order[i + 1 :]))


Algorithm: TypeAlias = Literal["ring", "tree", "nvls", "nvls_tree", "direct"]
"""*tree* is NCCL's double binary tree between servers with a chain in each; *nvls* sums in the NVSwitch, *nvls_tree*
joins such servers by a tree; *direct* sends to every rank. CollNet (SHARP in the network) is left out: no data."""

PAYLOAD: dict[Protocol, float] = {"LL": LL_PAYLOAD, "LL128": LL128_PAYLOAD, "Simple": 1.0}
"""Data per byte on the wire between servers; inside a server the fitted rates hold it."""

NETWORK_HOP: dict[tuple[Algorithm, Protocol], float] = {
    ("ring", "LL"): 2.7,
    ("ring", "LL128"): 4.0,
    ("ring", "Simple"): 14.0,
    ("tree", "LL"): 5.0,
    ("tree", "LL128"): 8.5,
    ("tree", "Simple"): 14.0,
    ("nvls_tree", "Simple"): 20.9,
    ("direct", "Simple"): 14.0,
}
"""Microseconds of a hop between servers: NCCL's constants."""


@dataclass(frozen=True, slots=True)
class Place:
    """Servers and links that the ranks have.

    Attributes:
        generation: of the GPUs.
        link: bytes/s per direction of a GPU's links.
        local: ranks in each server, the least where they differ.
        servers: how many.
        inter_rate: bytes/s that each GPU has to other servers.
        network_latency: ps per hop between servers beyond NCCL's constants.
    """

    generation: Generation
    link: float
    local: int
    servers: int
    inter_rate: float
    network_latency: Time

    @property
    def inter(self) -> float:
        """Return the bytes/s that a server has to the others."""
        return self.inter_rate * self.local if self.servers > 1 else math.inf

    @property
    def nvls(self) -> bool:
        """Return whether NCCL would reduce in the switch (NVLS)."""
        return self.generation.nvls is not None and self.local >= self.generation.nvls_ranks

    @property
    def depth(self) -> int:
        """Return the hops from the root of a tree over the servers to its leaves."""
        return math.ceil(math.log2(self.servers))

    @property
    def part(self) -> float:
        """Return this product's link rate as a share of its generation's."""
        return self.link / self.generation.link

    def hop(self, algorithm: Algorithm, protocol: Protocol) -> Time:
        """Return the ps between servers. Simple waits for the network twice: its flag follows its data."""
        waits = 2 if protocol == "Simple" else 1
        return round(NETWORK_HOP[algorithm, protocol] * MICROSECOND) + waits * self.network_latency


@dataclass(frozen=True, slots=True)
class Way:
    """An algorithm with a protocol, and its cost.

    Attributes:
        algorithm, protocol, curve: what and by which curve.
        steps: hops one after the other.
        waiting: ps of all of them.
        transfer: ps that the bytes add.
        wire: bytes of data through the busiest link in one direction.
        link: bytes/s of that link.
    """

    algorithm: Algorithm
    protocol: Protocol
    curve: ProtocolCurve
    steps: int
    waiting: Time
    transfer: float
    wire: float
    link: float


def ways(operation: Operation, size: int, ranks: int, place: Place) -> Iterator[Way]:
    """Yield every algorithm and protocol that could run the operation there, whether or not NCCL would choose it."""
    generation = place.generation
    if operation == "all_to_all":
        yield _direct(size, ranks, place)
        return
    curves: dict[Protocol, ProtocolCurve] = {
        "LL": generation.ll,
        "LL128": generation.ll128,
        "Simple": generation.simple,
    }
    for protocol, curve in curves.items():
        if protocol == "LL128" and not generation.has_ll128:
            continue
        yield _ring(operation, size, ranks, place, protocol, curve)
        if operation == "all_reduce" and place.servers > 1:
            yield _tree(size, place, protocol, curve)
    if operation == "all_reduce" and generation.nvls is not None and place.nvls:
        yield _nvls(size, place, generation.nvls)


def _way(
    algorithm: Algorithm,
    protocol: Protocol,
    curve: ProtocolCurve,
    place: Place,
    *,
    steps: int,
    waiting: Time,
    blocks: float,
    block: float,
    outside: float,
) -> Way:
    """Return a way that sends ``blocks`` blocks over each GPU's link and ``outside`` bytes over each server's NICs."""
    near = curve.rate * place.part
    far = place.inter * PAYLOAD[protocol] * blocks * block / outside if place.servers > 1 else math.inf
    transfer = curve.transfer(blocks, block, min(near, far))
    if far < near:
        return Way(algorithm, protocol, curve, steps, waiting, transfer, outside / place.local, place.inter_rate)
    return Way(algorithm, protocol, curve, steps, waiting, transfer, blocks * block, place.link)


def _ring(operation: Operation, size: int, ranks: int, place: Place, protocol: Protocol, curve: ProtocolCurve) -> Way:
    rounds = ROUNDS.get(operation, 1)
    steps, between = rounds * (ranks - 1), rounds * (place.servers - 1)
    blocks = steps
    if operation == "broadcast":
        # It goes along the ring in a pipeline: all N blocks cross every link, and copies hide behind them.
        blocks, curve = ranks, replace(curve, tail=0.0)
    block = size / ranks
    waiting = (steps - between) * curve.hop + between * place.hop("ring", protocol)
    # Each ring leaves a server once; NCCL starts its channels at different GPUs, so that all NICs share the bytes.
    return _way(
        "ring", protocol, curve, place, steps=steps, waiting=waiting, blocks=blocks, block=block, outside=blocks * block
    )


def _outside(size: int, place: Place) -> float:
    """Return the bytes that a tree makes the busiest server send.

    With two servers one sends up and one down. With more, half of the data has a tree in which the server has two
    children and a parent, and the other half one in which it is a leaf: (3 + 1) / 2.
    """
    return size if place.servers == 2 else 2.0 * size


def _tree(size: int, place: Place, protocol: Protocol, curve: ProtocolCurve) -> Way:
    """Return the way up and down a chain of GPUs in each server and double binary trees between the servers."""
    steps = 2 * (place.local - 1 + place.depth)
    waiting = 2 * ((place.local - 1) * curve.hop + place.depth * place.hop("tree", protocol))
    outside = _outside(size, place)
    return _way("tree", protocol, curve, place, steps=steps, waiting=waiting, blocks=2, block=size, outside=outside)


def _nvls(size: int, place: Place, curve: ProtocolCurve) -> Way:
    """Return the way through the reducing switch, and a tree between servers."""
    algorithm: Algorithm = "nvls" if place.servers == 1 else "nvls_tree"
    steps, waiting = 2 + 2 * place.depth, 2 * curve.hop
    if place.servers > 1:
        waiting += 2 * place.depth * place.hop("nvls_tree", "Simple")
    outside = _outside(size, place)
    return _way(algorithm, "Simple", curve, place, steps=steps, waiting=waiting, blocks=1, block=size, outside=outside)


def _direct(size: int, ranks: int, place: Place) -> Way:
    """Return the way of a block to every other rank; those for other servers share the GPU's part of the NICs."""
    curve, block = place.generation.direct, size / ranks
    waiting = (ranks - 1) * curve.hop + (place.hop("direct", "Simple") if place.servers > 1 else 0)
    outside = (ranks - place.local) * block * place.local
    return _way(
        "direct",
        "Simple",
        curve,
        place,
        steps=ranks - 1,
        waiting=waiting,
        blocks=ranks - 1,
        block=block,
        outside=outside,
    )
