"""Queues that a transport is made for, where nobody says others."""

from __future__ import annotations

from typing import Final

import numpy as np

from foretrain.network.packet import state as c
from foretrain.network.packet.port_config import UNLIMITED, Queues
from foretrain.network.packet.transports.rate_based import Dcqcn
from foretrain.network.packet.transports.transport import Transport
from foretrain.network.topology.graph import Topology
from foretrain.units import MICROSECOND, SECOND

_HELD: Final = 50 * MICROSECOND
_HOPS: Final = 6
_MARK_AT: Final = 65
"""Packets in a queue that is marked, at least: DCTCP's recommendation for 10 Gb/s (SIGCOMM 2010, 3.4)."""
_CUT_AT: Final = 8
"""Packets in a queue above which NDP cuts (SIGCOMM 2017)."""


def usual(topology: Topology, transport: Transport) -> Queues:
    """Those of switches.

    | transport | queues |
    |---|---|
    | pFabric | what is nearest to its end goes first; two products of bandwidth and delay of room |
    | NDP | eight packets of a class, and then headers, which are never dropped |
    | bounded loss | twice as many bytes of a class as DCTCP marks above, and then drops |
    | DCQCN | marks as its paper has it; nothing is dropped |
    | others | marks as `marking` does; nothing is dropped |
    """
    packet = transport.payload + transport.header
    if transport.flavour == c.NEAREST_FIRST:
        return Queues(nearest=True, room=2 * max(round(_in_flight(topology)), transport.first_window * packet))
    if transport.flavour == c.PULLED:
        limit = (UNLIMITED, *(_CUT_AT * packet for _ in range(1, c.CLASSES)))
        return Queues(limit=limit, cut_to=transport.reply)
    if transport.flavour == c.BOUNDED:
        return Queues(limit=2 * _threshold(topology, transport))
    if isinstance(transport, Dcqcn):
        return Queues(mark_from=5_000, mark_to=200_000, mark_chance=0.01)
    return marking(topology, transport)


def marking(topology: Topology, transport: Transport) -> Queues:
    """Queues that mark above DCTCP's K and drop nothing, as a fabric without losses.

    K is a seventh of what the fastest link sends in the round trip of six hops (SIGCOMM 2010, 3.4, equation 13), and
    at least 65 packets. One K serves all ports: on slow links it lets queues grow longer than they need.
    """
    k = _threshold(topology, transport)
    return Queues(mark_from=k, mark_to=k)


def holding(topology: Topology, transport: Transport) -> Queues:
    """Queues of hosts, which mark what would wait for 50 µs, but a first window, and drop nothing.

    A host's own data would else hold up the acknowledgements behind it until timers run out, which real hosts prevent
    by limits of what they hand to their network interfaces (TCP small queues in Linux).
    """
    forwards = np.array([node.forwards for node in topology.nodes], np.bool_)
    leaving = topology.capacity[~forwards[topology.source] & (topology.capacity > 0)]
    if not len(leaving):
        return Queues()
    k = max(transport.first_window * (transport.payload + transport.header), round(leaving.min() * _HELD / SECOND))
    return Queues(mark_from=k, mark_to=k)


def _threshold(topology: Topology, transport: Transport) -> int:
    """DCTCP's K, bytes."""
    return max(_MARK_AT * (transport.payload + transport.header), round(_in_flight(topology) / 7))


def _in_flight(topology: Topology) -> float:
    """Bytes that the fastest link sends in the longest round trip of six hops."""
    used = topology.capacity > 0
    round_trip = 2 * _HOPS * float(topology.latency[used].max(initial=0)) / SECOND
    return float(topology.capacity[used].max(initial=0.0)) * round_trip
