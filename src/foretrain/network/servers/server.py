"""What a fabric needs to know of what is plugged into it: a bare host, or a server with GPUs and NICs inside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from foretrain.network.topology.graph import Builder
from foretrain.units import NANOSECOND, Time

# Note [Metrics inside and outside]
# Routing adds up metrics, so these decide what real systems decide by rule. In ascending order: NVLink; PCIe below one
# switch; from one port of a PCIe switch to another; through a root complex; through a NIC's cable. Hence GPUs of one
# server use NVLink where they share some, and PCIe rather than the network where they do not; and a GPU leaves through
# its nearest NIC, because no way through a fabric is so long that crossing the root complex would save as much. A cable
# outside is dearer than two crossings of the whole server, because it is taken twice from server to server whatever the
# way, but never by those who can stay inside.
NVLINK, PCIE, SWITCH, ROOT, CABLE = 1, 10, 100, 10_000, 100_000

NVLINK_LATENCY: Time = 250 * NANOSECOND
PCIE_LATENCY: Time = 150 * NANOSECOND
ROOT_LATENCY: Time = 250 * NANOSECOND
"""Of one link each. Estimates: vendors publish none; 150 ns is what makers of PCIe switches state for a packet's way
through one, the others are chosen so that two NVLinks make half a microsecond."""


@dataclass(frozen=True, slots=True)
class ServerPorts:
    """What a server added.

    Attributes:
        ranks: its nodes that compute, in rank order.
        nics: its nodes that a fabric's cables end at.
    """

    ranks: tuple[int, ...]
    nics: tuple[int, ...]


class Server(Protocol):
    """A kind of server; see `Host`, `PCIeTree`, `NVSwitch` and `NVLinkMesh`."""

    @property
    def gpus(self) -> int:
        """Ranks in it."""
        ...

    @property
    def nics(self) -> int:
        """Cables to the fabric."""
        ...

    @property
    def port(self) -> float | None:
        """Bytes/s of each NIC's cable; None where the fabric must say."""
        ...

    def add(self, build: Builder, index: int) -> ServerPorts:
        """Adds server number ``index``."""
        ...


@dataclass(frozen=True, slots=True)
class Host:
    """A server seen from outside: one node that is one rank, with one cable.

    Attributes:
        forwards: whether it passes on what is for others, as in a torus.
    """

    forwards: bool = False
    gpus: int = 1
    nics: int = 1
    port: float | None = None

    def add(self, build: Builder, index: int) -> ServerPorts:
        """Adds ``host<index>``."""
        host = (build.node(f"host{index}", "host", server=index, forwards=self.forwards),)
        return ServerPorts(host, host)
