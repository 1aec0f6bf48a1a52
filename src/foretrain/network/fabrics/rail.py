"""Rail-optimised: NIC i of every server of a unit is on leaf i of that unit, and spines join all leaves.

GPUs of the same number in different servers of a unit are one switch apart. NVIDIA's DGX SuperPOD (reference
architecture for DGX H100: units of 32 servers, 8 leaves each); without spines, the rail-only network of Wang et al.
(HotI'24), where other rails are reached through the servers' PCIe. NCCL would go by NVLink there (PXN): not modelled.
"""

from __future__ import annotations

import math

from foretrain.errors import ConfigError
from foretrain.network.fabrics.cabling import LATENCY, attach, factor, port_rate, whole
from foretrain.network.servers import Server
from foretrain.network.topology.graph import Builder, Topology
from foretrain.units import Time

UNIT = 32
"""Servers of a scalable unit."""


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
