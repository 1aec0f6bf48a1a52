"""Routers that are linked to each other, without tiers: torus and dragonfly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from foretrain.errors import ConfigError
from foretrain.network.fabrics.clos import HOST, LATENCY, attach, port_rate, whole
from foretrain.network.servers import Host, Server
from foretrain.network.topology.graph import Builder, Topology
from foretrain.units import Time

GLOBAL_METRIC = 3
"""Of a global link, where a local one has 1: local, global, local is then shorter than two global links, as in minimal
routing, which takes at most one."""


def torus(
    shape: Sequence[int], rate: float | None = None, *, latency: Time = LATENCY, server: Server = HOST
) -> Topology:
    """Build a torus; places are numbered row by row, the last dimension fastest.

    A dimension of 2 has one cable between its two places and not two. With a server, each place has a router beside it
    that the server's NICs are plugged into, since servers do not pass on what is not for them.

    Args:
        shape: places in each dimension.
        rate: bytes/s of each cable; that of the server's ports where None.
        latency: of each cable, ps.
        server: what a place holds.
    """
    if not shape:
        raise ConfigError("shape", list(shape), "has no dimension", "write e.g. 4x4x4")
    sizes = [whole(f"shape[{i}]", size) for i, size in enumerate(shape)]
    port = port_rate(server, rate)
    build = Builder(f"torus({'x'.join(map(str, sizes))})")
    ranks: list[int] = []
    places: list[int] = []
    for place in range(math.prod(sizes)):
        if isinstance(server, Host):
            places += Host(forwards=True).add(build, place).ranks
            continue
        places.append(build.node(f"router{place}", "switch", tier=1))
        ranks += attach(build, server, place, places[-1:], rate=port, latency=latency)
    for a, b in _cables(sizes):
        build.cable(places[a], places[b], rate=port * server.nics, latency=latency)
    return build.topology(ranks or places)


def _cables(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield each place with its next one in each dimension."""
    for place in range(math.prod(sizes)):
        stride = 1
        for size in reversed(sizes):
            at = place // stride % size
            if size > 2 or at + 1 < size:
                yield place, place + ((at + 1) % size - at) * stride
            stride *= size


def dragonfly(
    a: int, p: int, h: int, rate: float | None = None, *, latency: Time = LATENCY, server: Server = HOST
) -> Topology:
    """Build the largest dragonfly of such routers.

    Groups of routers, fully linked inside, one link from group to group (Kim, Dally, Scott, Abts, ISCA'08): a routers a
    group, p places and h global links a router, a·h + 1 groups, a·p·(a·h + 1) places. Balanced at a = 2p = 2h. Global
    port j of group i goes to group i + j + 1, so that links are spread over the routers in their order.

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
