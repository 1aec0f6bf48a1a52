"""The k-ary fat tree (Al-Fares, Loukissas, Vahdat, SIGCOMM'08): three tiers of switches of k ports each.

k pods of k/2 edge and k/2 aggregation switches, (k/2)² cores, k³/4 hosts, full bisection. Core ``g·k/2 + i`` is linked
to aggregation switch g of every pod.
"""

from __future__ import annotations

from foretrain.network.fabrics.cabling import HOST, LATENCY, attach, port_rate, whole
from foretrain.network.servers import Server
from foretrain.network.topology.graph import Builder, Topology
from foretrain.units import Time


def fat_tree(
    k: int,
    rate: float | None = None,
    *,
    oversubscription: int = 1,
    latency: Time = LATENCY,
    server: Server = HOST,
) -> Topology:
    """Build a k-ary fat tree; places are numbered edge switch by edge switch, pod by pod.

    Args:
        k: ports of a switch, even.
        rate: bytes/s of each cable; that of the server's ports where None.
        oversubscription: how many times k/2 places each edge switch has, above which the tree stays as it is.
        latency: of each cable, ps.
        server: what a place holds.
    """
    half = whole("k", k, 2, even=True) // 2
    places = half * whole("oversubscription", oversubscription)
    port = port_rate(server, rate)
    trunk = port * server.nics
    build = Builder(f"fat_tree(k={k})" if oversubscription == 1 else f"fat_tree(k={k}, {oversubscription}:1)")
    cores = [build.node(f"core{i}", "switch", tier=3, bundle="core") for i in range(half * half)]
    ranks: list[int] = []
    for pod in range(k):
        tops = [build.node(f"pod{pod}.agg{i}", "switch", tier=2, bundle=f"pod{pod}") for i in range(half)]
        for i, top in enumerate(tops):
            for core in cores[i * half : (i + 1) * half]:
                build.cable(top, core, rate=trunk, latency=latency)
        for i in range(half):
            edge = build.node(f"pod{pod}.edge{i}", "switch", tier=1)
            for top in tops:
                build.cable(edge, top, rate=trunk, latency=latency)
            first = (pod * half + i) * places
            for place in range(first, first + places):
                ranks += attach(build, server, place, (edge,), rate=port, latency=latency)
    return build.topology(ranks)
