"""DLCP: the network of 144 hosts, the transports that are compared on it, and what switches and hosts do for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from foretrain.network.deployment_notation import topology
from foretrain.network.fabrics.clos import leaf_spine
from foretrain.network.packet import LinkLosses, Packets, Queues
from foretrain.network.packet.transports.transport import Bounded, Dctcp, NewReno, Pfabric, Transport
from foretrain.network.program import Paths
from foretrain.network.routing import Ecmp
from foretrain.network.topology.graph import Topology
from foretrain.units import MICROSECOND, MILLISECOND, SECOND, Time

RATE, LATENCY = 12.5e9, 500_000
PACKET = 1538
BUFFER, SHALLOW, MARK, PRODUCT = 800 * PACKET, 100 * PACKET, 65 * PACKET, 41 * PACKET
WORKERS = 8
CLASSES = 8
SEED = 0
HELD = Queues(mark_from=round(RATE * 50e-6), mark_to=round(RATE * 50e-6))
"""A host marks what would wait there for 50 µs, as TCP small queues keep short what Linux hands to its interface: what
else waits there delays the acknowledgements behind it until timers run out."""


@dataclass(frozen=True)
class Way:
    """A transport, and what ports do for it.

    Attributes:
        transport: of all flows.
        queues: of switches.
        hosts: of hosts.
        classes: of packets, by the layer that a tensor is of.
        back: whether all packets of the layers that are needed last are important.
        important: share of the other packets that is important: those of large magnitude, see `dlcp_tags`.
    """

    transport: Transport
    queues: Queues
    hosts: Queues = HELD
    classes: int = 1
    back: bool = False
    important: float = 1.0

    @property
    def tagged(self) -> bool:
        """Whether packets are important or may be dropped."""
        return isinstance(self.transport, Bounded)

    def on(self, where: Topology, losses: Mapping[int, LinkLosses] | None = None) -> Packets:
        """A network of packets that go this way."""
        return Packets(
            where, transport=self.transport, switches=self.queues, hosts=self.hosts, losses=losses, seed=SEED
        )


def bounded(
    tolerance: float = 0.1, mark: int = PRODUCT, important: float = 0.5, classes: int = CLASSES, *, back: bool = True
) -> Way:
    """DLCP as assumed: above K what is important is marked and what is not is dropped. Back layers are protected, and
    ``important`` of the front. Classes share the buffer equally, since what waits in the last ones would else leave no
    room for the first."""
    queues = Queues(limit=BUFFER // classes, mark_from=mark, mark_to=mark, spare=mark)
    return Way(Bounded(tolerance=tolerance), queues, classes=classes, back=back, important=important)


def dctcp(buffer: int = BUFFER, **knobs: Time) -> Way:
    """DCTCP with ports that mark above its K."""
    return Way(Dctcp(**knobs), Queues(limit=buffer, mark_from=MARK, mark_to=MARK))


_NEAREST = Queues(nearest=True, room=82 * PACKET)
DCTCP, DLCP = dctcp(), bounded()
PFABRIC = Way(Pfabric(first_window=61, most=61, least_timeout=45 * MICROSECOND), _NEAREST, _NEAREST)
PATIENT = dctcp(SHALLOW, least_timeout=10 * MILLISECOND)
"""An eighth of the buffer, and a timer that a user of a simulator may well set."""
SLOW = dctcp(SHALLOW, least_timeout=SECOND)
"""The same with the timer of RFC 6298, which is ns-3's default."""
LINUX = Way(NewReno(least_timeout=200 * MILLISECOND), Queues(limit=SHALLOW))
"""TCP as it comes: no marks, and Linux's least timeout."""


@cache
def fabric() -> Topology:
    """Nine leaves with sixteen hosts each under sixteen spines."""
    return leaf_spine(9, 16, RATE, latency=LATENCY)


@cache
def testbed() -> Topology:
    """Eight workers and a server at one switch."""
    return topology("star:9@100Gbps")


def places(jobs: int, each: int) -> NDArray[np.int32]:
    """Nodes of the fabric at random: (jobs, each)."""
    chosen = np.random.default_rng(SEED).permutation(len(fabric().ranks))[: jobs * each]
    return fabric().ranks[chosen.reshape(jobs, each)]


def sprayed(paths: Paths) -> list[Paths]:
    """Fifteen more ways of each flow, which packets take in turn: per-packet load balancing."""
    where = fabric()
    ends = where.source[paths.links[paths.first[:-1]]], where.target[paths.links[paths.first[1:] - 1]]
    number = np.arange(len(paths), dtype=np.int32)
    return [Ecmp(where, seed=SEED + k).paths(*ends, number) for k in range(1, 16)]


def with_tolerance(way: Way, tolerance: float) -> Way:
    """The same where other shares of a step may be lost."""
    assert isinstance(way.transport, Bounded)
    return replace(way, transport=replace(way.transport, tolerance=tolerance))
