"""Helpers of all fabrics: checks of their numbers, and cables of hosts or servers."""

from __future__ import annotations

from collections.abc import Sequence

from foretrain.errors import ConfigError
from foretrain.network.servers import Host, Server
from foretrain.network.servers.pcie import CABLE
from foretrain.network.topology.graph import Builder
from foretrain.units import NANOSECOND, Time

LATENCY: Time = 500 * NANOSECOND
"""Of a link of a fabric: a switch's way through (datasheets say 100 to 300 ns for InfiniBand, 300 to 500 ns for
Ethernet) and some 20 m of fibre at 5 ns/m. An estimate; a NIC's and the software's share is the collective's."""

HOST = Host()
"""What a place holds unless told otherwise."""


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
