"""Choice of algorithm, protocol and channels as NCCL makes it, and the time of the collective.

    time = launch + steps · step latency + bytes / (link rate · efficiency)

Inside a server the protocols are those that NCCL still uses at that size (`offered`), the times are fitted
(`generation`), and the fastest wins. Over several servers there is no fit: the same curves, with the latency of a
network hop by NCCL's constants and each server's NICs as a second limit of the rate.

# Note [What a simulation needs]
A plan of the chosen algorithm, whose every step costs ``step_latency`` on links that carry ``efficiency · link``, and
that starts after ``launch``, takes ``time`` on a network where nothing else is sent: the efficiency is defined as what
makes it so. In a contended network the plan then takes longer, which no formula tells.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

from foretrain.collective.nccl.generation import gpu_named
from foretrain.collective.nccl.variants import ROUNDS, Algorithm, Place, Protocol, Way, bus_bandwidth, offered, ways
from foretrain.collective.plan import Operation
from foretrain.errors import ConfigError, unknown
from foretrain.units import SECOND, Time

CHANNEL_TRAFFIC = 16 * 2**10
"""Bytes on the wire for which NCCL opens a further channel (MinTrafficPerChannel in its src/enqueue.cc)."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Algorithm and protocol that NCCL chooses for one call, and their cost.

    Attributes:
        operation, size, ranks, gpu: what was asked.
        algorithm, protocol: what is used.
        channels: on how many channels, hence connections per pair of neighbours.
        launch: ps that pass once, whatever the network does.
        steps: how often the algorithm waits for a hop, one after the other.
        step_latency: ps of each, the mean where hops inside and between servers differ.
        wire: bytes of data through the busiest link in one direction.
        link: bytes/s that link carries by its datasheet: a GPU's, or `inter_rate` where the network is slower.
        efficiency: part of it that the data gets, in (0, 1]; see Note [What a simulation needs].
        time: ps of the whole, rounded up.
        source: what the numbers are fitted on, or that and how they are extrapolated.
    """

    operation: Operation
    size: int
    ranks: int
    gpu: str
    algorithm: Algorithm
    protocol: Protocol
    channels: int
    launch: Time
    steps: int
    step_latency: Time
    wire: float
    link: float
    efficiency: float
    time: Time
    source: str

    @property
    def latency(self) -> Time:
        """Return the time that remains as the size goes to zero, in ps."""
        return self.launch + self.steps * self.step_latency

    @property
    def bandwidth(self) -> float:
        """Bus bandwidth in bytes/s, by the definition of nccl-tests."""
        return bus_bandwidth(self.operation, self.size, self.ranks, self.time)


def choose(
    operation: Operation,
    size: int,
    ranks: int,
    gpu: str = "H100",
    *,
    ranks_per_server: int | None = None,
    inter_rate: float | None = None,
    network_latency: Time = 0,
    overhead: Time = 0,
    algorithm: Algorithm | None = None,
    protocol: Protocol | None = None,
) -> Choice:
    """Return the algorithm and protocol that NCCL would choose, and its time.

    Args:
        operation: what to do.
        size: bytes, in the meaning of `Plan.size`, which is also that of nccl-tests.
        ranks: how many, at least 2, spread evenly.
        gpu: a name of `GPUS`, in any case.
        ranks_per_server: GPUs that NVLink connects; else what is usual for the GPU: 8, or 72 for GB200.
        inter_rate: bytes/s that each GPU has to other servers; needed for more than one server.
        network_latency: ps per hop between servers beyond NCCL's constants, which suit InfiniBand.
        overhead: ps that a framework adds to each call.
        algorithm, protocol: use only these (NCCL_ALGO, NCCL_PROTO), wherever NCCL would leave them.

    Raises:
        ConfigError: an argument is out of range, or nothing fits algorithm and protocol.
    """
    place = _place(operation, size, ranks, gpu, ranks_per_server, inter_rate, network_latency)
    known = _considered(operation, size, ranks, place, algorithm, protocol)
    if not known:
        remedy = "leave algorithm and protocol out to see what there is"
        raise ConfigError("algorithm", f"{algorithm}/{protocol}", f"cannot {operation} on {ranks} {gpu}", remedy)
    choices = [_choice(way, operation, size, ranks, gpu, place, overhead) for way in known]
    return min(choices, key=lambda choice: choice.time)


def _place(
    operation: Operation,
    size: int,
    ranks: int,
    gpu: str,
    ranks_per_server: int | None,
    inter_rate: float | None,
    network_latency: Time,
) -> Place:
    if operation not in get_args(Operation):
        raise unknown("operation", operation, get_args(Operation))
    for name, value, least in (("size", size, 1), ("ranks", ranks, 2), ("ranks_per_server", ranks_per_server, 1)):
        if value is not None and value < least:
            raise ConfigError(name, value, "is too small", f"give at least {least}")
    found = gpu_named(gpu)
    server = found.server if ranks_per_server is None else ranks_per_server
    servers = -(-ranks // server)
    if servers > 1 and (inter_rate is None or not inter_rate > 0):
        remedy = f"give the bytes/s that each GPU has to other servers: {ranks} ranks are on {servers} of them"
        raise ConfigError("inter_rate", inter_rate, "is not a rate", remedy)
    return Place(found.generation, found.link, ranks // servers, servers, inter_rate or math.inf, network_latency)


def _considered(
    operation: Operation, size: int, ranks: int, place: Place, algorithm: Algorithm | None, protocol: Protocol | None
) -> list[Way]:
    """Return the ways asked for, or else those that NCCL still uses at that size."""
    known = list(ways(operation, size, ranks, place))
    if algorithm is not None or protocol is not None:
        return [way for way in known if algorithm in (None, way.algorithm) and protocol in (None, way.protocol)]
    if operation == "all_to_all":
        return known
    nvls = operation == "all_reduce" and place.nvls and place.servers == 1
    # Between servers its estimate hangs on CPU and NIC: what it leaves in each of them it leaves between them.
    usable = offered(operation, size, place.local, place.generation, nvls=nvls, part=place.part)
    # With NVLS, Simple means NVLS.
    unused = ("ring", "Simple") if nvls else None
    return [way for way in known if way.protocol in usable and (way.algorithm, way.protocol) != unused]


def _channels(operation: Operation, size: int, way: Way, place: Place) -> int:
    """Return the number of channels; LL counts fourfold in NCCL, which keeps it latency-bound."""
    weight = 4 if way.protocol == "LL" or way.algorithm == "direct" else 1
    traffic = size * weight * ROUNDS.get(operation, 1)
    return min(max(-(-traffic // CHANNEL_TRAFFIC), 1), place.generation.channels)


def _choice(way: Way, operation: Operation, size: int, ranks: int, gpu: str, place: Place, overhead: Time) -> Choice:
    channels = _channels(operation, size, way, place)
    spread = way.curve.spread * math.log(channels) / math.log(place.generation.channels)
    launch = round(way.curve.launch + spread) + overhead
    step_latency = -(-way.waiting // way.steps)
    transfer = math.ceil(way.transfer)
    return Choice(
        operation=operation,
        size=size,
        ranks=ranks,
        gpu=gpu,
        algorithm=way.algorithm,
        protocol=way.protocol,
        channels=channels,
        launch=launch,
        steps=way.steps,
        step_latency=step_latency,
        wire=way.wire,
        link=way.link,
        efficiency=way.wire * SECOND / (transfer * way.link),
        time=launch + way.steps * step_latency + transfer,
        source=_source(gpu, place),
    )


def _source(gpu: str, place: Place) -> str:
    fitted = gpu_named(gpu).fitted
    near = place.generation.source if fitted else f"extrapolated to {gpu} ({place.generation.source})"
    return near if place.servers == 1 else f"extrapolated to {place.servers} servers ({near})"
