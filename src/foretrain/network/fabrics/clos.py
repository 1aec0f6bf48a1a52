"""Switches in tiers, all linked to all of the next: star, leaf-spine, fat tree, rails, and BiGraph's two parts.

Begins with what all fabrics use: checks of their numbers, and cables of hosts or servers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from foretrain.errors import ConfigError
from foretrain.network.servers import Host, Server
from foretrain.network.servers.pcie import CABLE
from foretrain.network.topology.graph import Builder, Topology
from foretrain.units import NANOSECOND, Time

LATENCY: Time = 500 * NANOSECOND
"""Of a link of a fabric: a switch's way through (datasheets say 100 to 300 ns for InfiniBand, 300 to 500 ns for
Ethernet) and some 20 m of fibre at 5 ns/m. An estimate; a NIC's and the software's share is the collective's."""

HOST = Host()
"""Server in each place of a fabric unless another is named."""


def whole(field: str, value: object, least: int = 1, *, even: bool = False) -> int:
    """Return ``value``, a number of things; ConfigError where it is not."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (even and value % 2):
        kind = "an even number" if even else "a whole number"
        raise ConfigError(field, value, f"is not {kind} of at least {least}", f"write e.g. {max(least, 4)}")
    return value


def factor(field: str, value: object) -> float:
    """Return ``value``, an oversubscription; ConfigError where it is not a positive number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ConfigError(field, value, "is not a positive number", "write e.g. 2 for 2:1")
    return float(value)


def port_rate(server: Server, rate: float | None) -> float:
    """Return the rate of a place's cables: ``rate``, or else that of the server's ports."""
    found = server.port if rate is None else rate
    if found is None:
        raise ConfigError("rate", None, "is missing", "say how fast a host's link is, e.g. '100Gbps'")
    return found


def attach(
    build: Builder, server: Server, index: int, switches: Sequence[int], *, rate: float, latency: Time
) -> tuple[int, ...]:
    """Add server number ``index``, its NICs plugged into ``switches`` in turn, and return its ranks."""
    ports = server.add(build, index)
    for number, nic in enumerate(ports.nics):
        # Dear, so that nobody leaves a server who can stay inside: Note [Metrics inside and outside].
        build.cable(nic, switches[number % len(switches)], rate=rate, latency=latency, metric=CABLE)
    return ports.ranks


UNIT = 32
"""Servers of a scalable unit."""


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


def fat_tree(
    k: int,
    rate: float | None = None,
    *,
    oversubscription: int = 1,
    latency: Time = LATENCY,
    server: Server = HOST,
) -> Topology:
    """Build a k-ary fat tree; places are numbered edge switch by edge switch, pod by pod.

    Three tiers (Al-Fares, Loukissas, Vahdat, SIGCOMM'08): k pods of k/2 edge and k/2 aggregation switches, (k/2)²
    cores, k³/4 hosts, full bisection. Core ``g·k/2 + i`` is linked to aggregation switch g of every pod.

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


def rail(
    servers: int,
    rate: float | None = None,
    *,
    server: Server,
    unit: int = UNIT,
    spines: int | None = None,
    oversubscription: float = 1,
    latency: Time = LATENCY,
) -> Topology:
    """Build a fabric of ``servers``, in units of ``unit``; the last unit may be smaller.

    NIC i of every server of a unit is on leaf i of that unit, and spines join all leaves: GPUs of the same number in
    different servers of a unit are one switch apart. NVIDIA's DGX SuperPOD (reference architecture for DGX H100: units
    of 32 servers, 8 leaves each); without spines, the rail-only network of Wang et al. (HotI'24), where other rails are
    reached through the servers' PCIe. NCCL would go by NVLink there (PXN): not modelled.

    Args:
        servers: how many.
        rate: bytes/s of each NIC's cable; that of the server's ports where None.
        server: their kind.
        unit: servers that share their leaves.
        spines: switches above all leaves, 0 for none; as many as make their links as fast as a NIC's cable where None.
        oversubscription: how many times less a full leaf sends up than it is sent.
        latency: of each cable, ps.
    """
    whole("servers", servers)
    size = min(whole("unit", unit), servers)
    over = factor("oversubscription", oversubscription)
    above = max(1, math.ceil(size / over)) if spines is None else whole("spines", spines, 0)
    units = math.ceil(servers / size)
    if not above and units > 1:
        raise ConfigError("spines", 0, f"leaves {units} units apart", f"write unit={servers}, or leave spines out")
    port = port_rate(server, rate)
    build = Builder(f"rail({servers})")
    tops = [build.node(f"spine{i}", "switch", tier=2, bundle="spine") for i in range(above)]
    ranks: list[int] = []
    for number in range(units):
        leaves = [build.node(f"unit{number}.rail{i}", "switch", tier=1) for i in range(server.nics)]
        for leaf in leaves:
            for top in tops:
                build.cable(leaf, top, rate=size * port / over / above, latency=latency)
        for index in range(number * size, min((number + 1) * size, servers)):
            ranks += attach(build, server, index, leaves, rate=port, latency=latency)
    return build.topology(ranks)


def bigraph(
    switches: int, hosts: int, rate: float | None = None, *, latency: Time = LATENCY, server: Server = HOST
) -> Topology:
    """Build a BiGraph. Place ``(part·N/2 + i)·M + j`` is port j of switch i of the upper (0) or lower (1) part.

    Source: Dong et al., EFLOPS, HPCA'20. N switches, N/2 upper and N/2 lower, M places each; one link for each pair of
    an upper and a lower switch, none inside a part. Hosts in different parts have exactly one direct way, over two
    switches; hosts of one part meet over three. A switch has M + N/2 ports, and with M = N/2 as much goes to the other
    part as hosts send.

    Args:
        switches: N, even.
        hosts: M, places at each switch.
        rate: bytes/s of each cable; that of the server's ports where None.
        latency: of each cable, ps.
        server: what a place holds.
    """
    half = whole("switches", switches, 2, even=True) // 2
    whole("hosts", hosts)
    port = port_rate(server, rate)
    build = Builder(f"bigraph({switches}x{hosts})")
    # Switches of one part are not a bundle: each is the only direct way to the hosts plugged into it.
    upper = [build.node(f"upper{i}", "switch", tier=2) for i in range(half)]
    lower = [build.node(f"lower{i}", "switch", tier=1) for i in range(half)]
    for above in upper:
        for below in lower:
            build.cable(above, below, rate=port * server.nics, latency=latency)
    ranks: list[int] = []
    for number, switch in enumerate(upper + lower):
        for place in range(number * hosts, (number + 1) * hosts):
            ranks += attach(build, server, place, (switch,), rate=port, latency=latency)
    return build.topology(ranks)
