"""Torus: a grid of any number of dimensions whose rows close to rings, without switches; hosts pass messages on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from foretrain.errors import ConfigError
from foretrain.network.fabrics.cabling import HOST, LATENCY, attach, port_rate, whole
from foretrain.network.servers import Host, Server
from foretrain.network.topology.graph import Builder, Topology
from foretrain.units import Time


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
