"""Dragonfly (Kim, Dally, Scott, Abts, ISCA'08): groups of routers, fully linked inside, one link from group to group.

a routers a group, p places and h global links a router: a·h + 1 groups, a·p·(a·h + 1) places. Balanced at a = 2p = 2h.
Global port j of group i goes to group i + j + 1, so that links are spread over the routers in their order.
"""

from __future__ import annotations

from foretrain.network.fabrics.cabling import HOST, LATENCY, attach, port_rate, whole
from foretrain.network.servers import Server
from foretrain.network.topology.graph import Builder, Topology
from foretrain.units import Time

GLOBAL_METRIC = 3
"""Of a global link, where a local one has 1: local, global, local is then shorter than two global links, as in minimal
routing, which takes at most one."""


def dragonfly(
    a: int, p: int, h: int, rate: float | None = None, *, latency: Time = LATENCY, server: Server = HOST
) -> Topology:
    """Build the largest dragonfly of such routers.

    Args:
        a: routers in a group.
        p: places at a router.
        h: global links of a router.
        rate: bytes/s of each cable; that of the server's ports where None.
        latency: of each cable, global ones included, ps.
        server: what a place holds.
    """
    for field, value in (("a", a), ("p", p), ("h", h)):
        whole(field, value)
    port = port_rate(server, rate)
    trunk, groups = port * server.nics, a * h + 1
    build = Builder(f"dragonfly(a={a}, p={p}, h={h})")
    routers = [[build.node(f"group{g}.router{r}", "switch", tier=1) for r in range(a)] for g in range(groups)]
    ranks: list[int] = []
    for g, group in enumerate(routers):
        for r, router in enumerate(group):
            for other in group[r + 1 :]:
                build.cable(router, other, rate=trunk, latency=latency)
            first = (g * a + r) * p
            for place in range(first, first + p):
                ranks += attach(build, server, place, (router,), rate=port, latency=latency)
        for j in range(groups - 1 - g):
            # Port j of this group meets port a·h − 1 − j of the group j + 1 further.
            far = routers[g + j + 1][(a * h - 1 - j) // h]
            build.cable(group[j // h], far, rate=trunk, latency=latency, metric=GLOBAL_METRIC)
    return build.topology(ranks)
