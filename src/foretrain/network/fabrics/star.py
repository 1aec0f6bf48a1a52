"""Star: every host on one switch that does not block."""

from __future__ import annotations

from foretrain.network.fabrics.cabling import HOST, LATENCY, attach, port_rate, whole
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
