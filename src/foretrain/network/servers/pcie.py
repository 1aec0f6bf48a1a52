"""PCIe servers: GPUs and NICs under switches, under the root complexes of the sockets, with host memory and storage.

    socket 0  root ── memory, storage, shared NICs        root of socket 1
                │                                           │
              switch ──────────────┐                       ...
                │                  │
              port 0: GPUs, NICs  port 1: GPUs, NICs

A *port* holds the GPUs and the NICs that belong together: two GPUs and one NIC in a DGX-1, one and one since then.
Where a switch has one port, port and switch are one node. Real switches have no such inner node: it exists so that a
GPU's nearest NIC is the one that communication libraries choose for it, and its own links never limit.

# Note [EFLOPS]
EFLOPS' server and the one it is compared with (Dong et al., HPCA'20). The baseline hangs all GPUs below one PCIe switch
and one NIC on the root complex, where host memory and storage are as well: k GPUs share min(PCIe, NIC), and copies of
input data compete with them. EFLOPS puts a NIC beside each GPU under the same PCIe switch, so that gradients never
reach a root complex. The paper's parts list was not to be had: counts and rates are ours, for 2019, and every one can
be changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from foretrain.errors import ConfigError
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
    """Nodes that a server added to a topology.

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
        """Return the number of ranks in it."""
        ...

    @property
    def nics(self) -> int:
        """Return the number of cables to the fabric."""
        ...

    @property
    def port(self) -> float | None:
        """Bytes/s of each NIC's cable; None where the fabric must say."""
        ...

    def add(self, build: Builder, index: int) -> ServerPorts:
        """Add server number ``index``."""
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
        """Add ``host<index>``."""
        host = (build.node(f"host{index}", "host", server=index, forwards=self.forwards),)
        return ServerPorts(host, host)


_PAYLOAD = 256 / (256 + 24)
"""Part of a PCIe link that is payload: 256 bytes a packet, and 24 of framing, sequence number, header, checksum."""
_GEN3 = 8e9 * 16 * (128 / 130) / 8 * _PAYLOAD
PCIE3, PCIE4, PCIE5, PCIE6 = _GEN3, 2 * _GEN3, 4 * _GEN3, 8 * _GEN3
"""Payload, bytes/s, of 16 lanes in one direction: 8, 16, 32 or 64 GT/s a lane, 128b/130b coding (PCIe base
specifications), or what 6.0 has in place of it and loses as much by: 14.4, 28.8, 57.6, 115 GB/s. Flow control costs a
little more; copies that are measured get 0.9 of this."""


@dataclass(frozen=True, slots=True)
class PCIeTree:
    """GPUs that meet over PCIe alone: the baseline server of EFLOPS, and what is below the NVLinks of others.

    Attributes:
        sockets: root complexes, each linked to all others.
        switches: PCIe switches, spread evenly over the sockets.
        ports: ports on each of them.
        gpus_per_port, nics_per_port: what each port holds.
        shared: NICs at the first root complex, for all GPUs.
        lanes: bytes/s of each PCIe link.
        port: bytes/s of each NIC's cable.
        peer: bytes/s between two root complexes, as peers get it.
        memory: bytes/s of each socket's memory; 0 for none.
        storage: bytes/s of the storage at the first root complex; 0 for none.
        root: metric of the links at a root complex; above that of two cables, GPUs meet through their NICs instead.
    """

    sockets: int
    switches: int
    ports: int
    gpus_per_port: int
    nics_per_port: int
    lanes: float
    port: float | None
    peer: float
    shared: int = 0
    memory: float = 0.0
    storage: float = 0.0
    root: int = ROOT

    def __post_init__(self) -> None:
        for field in ("sockets", "switches", "ports", "gpus_per_port"):
            if getattr(self, field) < 1:
                raise ConfigError(f"server.{field}", getattr(self, field), "is below 1", "write e.g. 2")
        if self.switches % self.sockets:
            raise ConfigError(
                "server.switches", self.switches, f"do not spread over {self.sockets} sockets", "write a multiple"
            )
        if not self.nics:
            raise ConfigError("server.nics", 0, "cut the server off", "put a NIC at each port or at the root complex")

    @property
    def gpus(self) -> int:
        """Return the number of ranks in it."""
        return self.switches * self.ports * self.gpus_per_port

    @property
    def nics(self) -> int:
        """Return the number of cables to the fabric."""
        return self.switches * self.ports * self.nics_per_port + self.shared

    def add(self, build: Builder, index: int) -> ServerPorts:
        """Add ``s<index>.gpu0`` … ``.nic0`` … ``.pcie0`` … ``.root0`` … ``.memory0`` … ``.storage``."""
        return self.add_host(build, index, 0, f"s{index}")

    def add_host(self, build: Builder, index: int, host: int, name: str) -> ServerPorts:
        """Add the same as a machine of a server, with names that begin with ``name``."""
        gpus = [build.node(f"{name}.gpu{i}", "gpu", server=index, host=host) for i in range(self.gpus)]
        nics = [build.node(f"{name}.nic{i}", "nic", server=index) for i in range(self.nics)]
        roots = self._roots(build, name, index)
        for nic in nics[len(nics) - self.shared :]:
            build.cable(nic, roots[0], rate=self.lanes, latency=PCIE_LATENCY, metric=self.root)
        for switch in range(self.switches):
            top = build.node(f"{name}.pcie{switch}", "pcie", server=index)
            root = roots[switch * self.sockets // self.switches]
            build.cable(top, root, rate=self.lanes, latency=ROOT_LATENCY, metric=self.root)
            for port in range(self.ports):
                at = top if self.ports == 1 else self._port(build, f"{name}.pcie{switch}.{port}", index, top)
                place = switch * self.ports + port
                for each, below in ((self.gpus_per_port, gpus), (self.nics_per_port, nics)):
                    for device in below[place * each : (place + 1) * each]:
                        build.cable(device, at, rate=self.lanes, latency=PCIE_LATENCY, metric=PCIE)
        return ServerPorts(tuple(gpus), tuple(nics))

    def _roots(self, build: Builder, name: str, index: int) -> list[int]:
        roots = [build.node(f"{name}.root{i}", "root", server=index) for i in range(self.sockets)]
        for i, a in enumerate(roots):
            for b in roots[i + 1 :]:
                build.cable(a, b, rate=self.peer, latency=ROOT_LATENCY, metric=self.root)
            if self.memory:
                memory = build.node(f"{name}.memory{i}", "memory", server=index)
                build.cable(a, memory, rate=self.memory, latency=PCIE_LATENCY, metric=PCIE)
        if self.storage:
            storage = build.node(f"{name}.storage", "storage", server=index)
            build.cable(roots[0], storage, rate=self.storage, latency=PCIE_LATENCY, metric=PCIE)
        return roots

    def _port(self, build: Builder, name: str, index: int, top: int) -> int:
        at = build.node(name, "pcie", server=index)
        inside = self.lanes * (self.gpus_per_port + self.nics_per_port)
        build.cable(at, top, rate=inside, latency=0, metric=SWITCH)
        return at


NIC = 12.5e9
"""100 Gb/s Ethernet (RoCE)."""
MEMORY = 6 * 21.3e9
"""Six channels of DDR4-2666: a Xeon of the Skylake or Cascade Lake generation (Intel ARK)."""
STORAGE = 3.2e9
"""One NVMe drive on four lanes of PCIe 3.0 that reads sequentially, an estimate from datasheets of 2019."""
PEER = 10e9
"""Between the sockets of that generation for GPUs as peers (NCCL, ``SKL_QPI_BW`` in src/graph/topo.h)."""


def eflops(gpus: int = 8, *, nic: float = NIC, pcie: float = PCIE3) -> PCIeTree:
    """Return EFLOPS' server, with one NIC beside each of ``gpus`` GPUs, under PCIe switches of two sockets (one, if
    odd).

    GPUs of one server meet through their NICs and the switch outside.
    """
    return PCIeTree(
        sockets=1 if gpus % 2 else 2, switches=gpus, ports=1, gpus_per_port=1, nics_per_port=1,
        lanes=pcie, port=nic, peer=PEER, memory=MEMORY, storage=STORAGE, root=10 * CABLE,
    )  # fmt: skip


def eflops_baseline(gpus: int = 8, *, nic: float = NIC, pcie: float = PCIE3) -> PCIeTree:
    """Return the baseline: all GPUs below one PCIe switch; one NIC, memory and storage at the root complex."""
    return PCIeTree(
        sockets=1, switches=1, ports=1, gpus_per_port=gpus, nics_per_port=0, shared=1,
        lanes=pcie, port=nic, peer=PEER, memory=MEMORY, storage=STORAGE,
    )  # fmt: skip
