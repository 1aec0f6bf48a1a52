"""Star, one switch that does not block, and leaf-spine, the two-tier Clos network: every leaf linked to every spine."""

from __future__ import annotations

import math

from foretrain.network.fabrics.cabling import HOST, LATENCY, attach, factor, port_rate, whole
from foretrain.network.servers import Server
from foretrain.network.topology.graph import Builder, Topology
from foretrain.units import Time


def star(hosts: int, rate: float | None = None, *, latency: Time = LATENCY, server: Server = HOST) -> Topology:
    """Build ``hosts`` places on one switch.

    Args:
        hosts: places.
        rate: bytes/s of each cable; that of the server's ports where None.
        latency: of each cable, ps.
        server: what a place holds.
    """
    whole("hosts", hosts)
    port = port_rate(server, rate)
    build = Builder(f"star({hosts})")
    switch = build.node("switch", "switch", tier=1)
    ranks = [
        rank for place in range(hosts) for rank in attach(build, server, place, (switch,), rate=port, latency=latency)
    ]
    return build.topology(ranks)


def leaf_spine(
    leaves: int,
    hosts: int,
    rate: float | None = None,
    *,
    spines: int | None = None,
    oversubscription: float = 1,
    latency: Time = LATENCY,
    server: Server = HOST,
) -> Topology:
    """Build ``leaves`` switches of ``hosts`` places each, under ``spines`` switches.

    Args:
        leaves: switches that places are at.
        hosts: places at each of them.
        rate: bytes/s of a place's cables; that of the server's ports where None.
        spines: switches above; as many as make each of their links as fast as a server's cables together where None.
        oversubscription: how many times less a leaf sends up than its places send it. The links between leaves and
            spines are as fast as this says.
        latency: of each cable, ps.
        server: what a place holds.
    """
    whole("leaves", leaves)
    whole("hosts", hosts)
    over = factor("oversubscription", oversubscription)
    above = max(1, math.ceil(hosts / over)) if spines is None else whole("spines", spines)
    port = port_rate(server, rate)
    build = Builder(f"leaf_spine({leaves}x{hosts}, {above} spines, {over:g}:1)")
    tops = [build.node(f"spine{i}", "switch", tier=2, bundle="spine") for i in range(above)]
    ranks: list[int] = []
    for i in range(leaves):
        leaf = build.node(f"leaf{i}", "switch", tier=1)
        for top in tops:
            build.cable(leaf, top, rate=hosts * server.nics * port / over / above, latency=latency)
        for place in range(i * hosts, (i + 1) * hosts):
            ranks += attach(build, server, place, (leaf,), rate=port, latency=latency)
    return build.topology(ranks)
