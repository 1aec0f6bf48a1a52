"""BiGraph (Dong et al., EFLOPS, HPCA'20): two parts of switches, all with hosts, each linked to all of the other part.

N switches, N/2 upper and N/2 lower, M places each; one link for each pair of an upper and a lower switch, none inside
a part. Hosts in different parts have exactly one direct way, over two switches; hosts of one part meet over three. A
switch has M + N/2 ports, and with M = N/2 as much goes to the other part as hosts send.
"""

from __future__ import annotations

from foretrain.network.fabrics.cabling import HOST, LATENCY, attach, port_rate, whole
from foretrain.network.servers import Server
from foretrain.network.topology.graph import Builder, Topology
from foretrain.units import Time


def bigraph(
    switches: int, hosts: int, rate: float | None = None, *, latency: Time = LATENCY, server: Server = HOST
) -> Topology:
    """Build a BiGraph. Place ``(part·N/2 + i)·M + j`` is port j of switch i of the upper (0) or lower (1) part.

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
