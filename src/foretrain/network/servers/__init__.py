"""Servers, which stand between a GPU and the network. `preset` knows real ones by name.

Those of PCIe alone are in `pcie`; here GPUs are linked by NVLink besides: through NVSwitches, or pair by pair in a
mesh.

Rates are one direction. NVLink and network are the datasheets' nominal rates; PCIe is payload (see
`foretrain.network.servers.pcie`); memory is channels times transfer rate of the CPU's datasheet; what GPUs get between
sockets is what NCCL reckons with (``src/graph/topo.h``: BDW_QPI_BW, AMD_ZEN12_BW, SRP_QPI_BW).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from foretrain.errors import ConfigError, unknown
from foretrain.network.servers.pcie import (
    NVLINK,
    NVLINK_LATENCY,
    PCIE3,
    PCIE4,
    PCIE5,
    PCIE6,
    Host,
    PCIeTree,
    Server,
    ServerPorts,
    eflops,
    eflops_baseline,
)
from foretrain.network.topology.graph import Builder


@dataclass(frozen=True, slots=True)
class _NVLinkServer:
    """A PCIe tree whose GPUs have NVLinks besides.

    Attributes:
        tree: GPUs, NICs and what is above them.
        nvlink: bytes/s in one direction: of all NVLinks of a GPU with NVSwitches, of one NVLink in a mesh.
    """

    tree: PCIeTree
    nvlink: float

    @property
    def gpus(self) -> int:
        """Return the number of ranks in it."""
        return self.tree.gpus

    @property
    def nics(self) -> int:
        """Return the number of cables to the fabric."""
        return self.tree.nics

    @property
    def port(self) -> float | None:
        """Return the bytes/s of each NIC's cable."""
        return self.tree.port


@dataclass(frozen=True, slots=True)
class NVSwitch(_NVLinkServer):
    """Server in which every GPU reaches every other at the full rate of its NVLinks.

    The NVSwitches of a server are drawn as one node with one fat link to each GPU, because each GPU spreads its links
    evenly over them and they do not block.

    Attributes:
        reduces: whether the switch sums what passes through it (NVLS, since the third generation).
    """

    reduces: bool = False

    def add(self, build: Builder, index: int) -> ServerPorts:
        """Add the tree, and ``s<index>.nvswitch``."""
        ports = self.tree.add(build, index)
        self.add_switch(build, index, ports.ranks)
        return ports

    def add_switch(self, build: Builder, index: int, gpus: Sequence[int]) -> None:
        """Add the node that stands for all NVSwitches."""
        switch = build.node(f"s{index}.nvswitch", "nvswitch", server=index, reduces=self.reduces)
        for gpu in gpus:
            build.cable(gpu, switch, rate=self.nvlink, latency=NVLINK_LATENCY, metric=NVLINK)


@dataclass(frozen=True, slots=True)
class NVLinkRack(NVSwitch):
    """Rack of several machines whose GPUs share NVSwitches: one server to the network, with the NICs of all of them.

    Attributes:
        tree: GPUs, NICs and what is above them in one machine.
        hosts: machines.
    """

    hosts: int = 18

    @property
    def gpus(self) -> int:
        """Return the number of ranks in it."""
        return self.hosts * self.tree.gpus

    @property
    def nics(self) -> int:
        """Return the number of cables to the fabric."""
        return self.hosts * self.tree.nics

    def add(self, build: Builder, index: int) -> ServerPorts:
        """Add the tree of each machine, ``s<index>.host0`` and so on, and ``s<index>.nvswitch``."""
        ports = [self.tree.add_host(build, index, host, f"s{index}.host{host}") for host in range(self.hosts)]
        ranks = tuple(rank for each in ports for rank in each.ranks)
        self.add_switch(build, index, ranks)
        return ServerPorts(ranks, tuple(nic for each in ports for nic in each.nics))


HYBRID_CUBE_MESH: Mapping[tuple[int, int], int] = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (1, 2): 2, (1, 3): 1, (2, 3): 2,
    (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
    (0, 4): 2, (1, 5): 2, (2, 6): 1, (3, 7): 1,
}  # fmt: skip
"""NVLinks between the GPUs of a DGX-1 with V100: two fully linked groups of four, and four pairs across; six links a
GPU. As ``nvidia-smi topo -m`` prints it there (NVIDIA, DGX-1 with Tesla V100 system architecture, WP-08437).
"""


@dataclass(frozen=True, slots=True)
class NVLinkMesh(_NVLinkServer):
    """Server whose GPUs are linked pair by pair.

    GPUs do not forward for each other, as in NCCL's rings: without a link of their own, a pair meets over PCIe.

    Attributes:
        pairs: how many NVLinks there are between two GPUs.
    """

    pairs: Mapping[tuple[int, int], int] = field(default_factory=lambda: HYBRID_CUBE_MESH)

    def __post_init__(self) -> None:
        for pair, links in self.pairs.items():
            if not (0 <= min(pair) < max(pair) < self.gpus and links >= 1):
                raise ConfigError("server.pairs", f"{pair}: {links}", "is no link", f"GPUs are 0 to {self.gpus - 1}")

    def add(self, build: Builder, index: int) -> ServerPorts:
        """Add the tree, and one cable for each pair, as fast as its links together."""
        ports = self.tree.add(build, index)
        for (a, b), links in self.pairs.items():
            rate = links * self.nvlink
            build.cable(ports.ranks[a], ports.ranks[b], rate=rate, latency=2 * NVLINK_LATENCY, metric=NVLINK)
        return ports


__all__ = ["SERVERS", "Host", "NVLinkMesh", "NVLinkRack", "NVSwitch", "PCIeTree", "Server", "ServerPorts", "preset"]

_GB = 1e9

# DGX H100: 18 links of NVLink 4, 450 GB/s, NVSwitches that reduce; one ConnectX-7 (400 Gb/s NDR) beside each GPU on
# PCIe 5.0; 2 × Xeon Platinum 8480C, eight channels of DDR5-4800. DGX H200 differs in its GPUs' memory alone.
_DGX_H100 = NVSwitch(
    PCIeTree(
        sockets=2, switches=8, ports=1, gpus_per_port=1, nics_per_port=1,
        lanes=PCIE5, port=50 * _GB, peer=22 * _GB, memory=307.2 * _GB,
    ),
    450 * _GB,
    reduces=True,
)  # fmt: skip
_SERVERS: dict[str, Server] = {
    "host": Host(),
    # DGX-1 with Tesla V100: 6 links of NVLink 2 a GPU, 25 GB/s each; 4 PCIe 3.0 switches with two GPUs and one EDR
    # adapter (100 Gb/s) each; 2 × Xeon E5-2698 v4, four channels of DDR4-2400.
    "dgx-v100": NVLinkMesh(
        PCIeTree(
            sockets=2, switches=4, ports=1, gpus_per_port=2, nics_per_port=1,
            lanes=PCIE3, port=12.5 * _GB, peer=6 * _GB, memory=76.8 * _GB,
        ),
        25 * _GB,
    ),
    # DGX A100: 12 links of NVLink 3, 300 GB/s; 4 PCIe 4.0 switches with two GPUs and two HDR adapters (200 Gb/s) each;
    # 2 × EPYC 7742, eight channels of DDR4-3200.
    "dgx-a100": NVSwitch(
        PCIeTree(
            sockets=2, switches=4, ports=2, gpus_per_port=1, nics_per_port=1,
            lanes=PCIE4, port=25 * _GB, peer=16 * _GB, memory=204.8 * _GB,
        ),
        300 * _GB,
    ),
    "dgx-h100": _DGX_H100,
    "dgx-h200": _DGX_H100,
    # DGX B200: NVLink 5, 900 GB/s a GPU; ConnectX-7 at 400 Gb/s beside each; 2 × Xeon Platinum 8570, eight channels of
    # DDR5-5600; between the sockets ERP_QPI_BW.
    "dgx-b200": NVSwitch(
        PCIeTree(
            sockets=2, switches=8, ports=1, gpus_per_port=1, nics_per_port=1,
            lanes=PCIE5, port=50 * _GB, peer=40 * _GB, memory=358.4 * _GB,
        ),
        900 * _GB,
        reduces=True,
    ),
    # DGX B300: NVLink 5; ConnectX-8 at 800 Gb/s beside each GPU on PCIe 6.0; 2 × Xeon 6776P, eight channels of
    # DDR5-6400.
    "dgx-b300": NVSwitch(
        PCIeTree(
            sockets=2, switches=8, ports=1, gpus_per_port=1, nics_per_port=1,
            lanes=PCIE6, port=100 * _GB, peer=40 * _GB, memory=409.6 * _GB,
        ),
        900 * _GB,
        reduces=True,
    ),
    # GB200 NVL72: 18 machines with two Grace CPUs, 512 GB/s of LPDDR5X each, and four GPUs; NVLink 5 joins all 72.
    # Beside each GPU a ConnectX-7 at 400 Gb/s. GPUs hang on Grace by NVLink-C2C, which is faster than the NICs' PCIe.
    "gb200-nvl72": NVLinkRack(
        PCIeTree(
            sockets=2, switches=4, ports=1, gpus_per_port=1, nics_per_port=1,
            lanes=PCIE5, port=50 * _GB, peer=40 * _GB, memory=512 * _GB,
        ),
        900 * _GB,
        reduces=True,
    ),
    # GB300 NVL72: the same with ConnectX-8 at 800 Gb/s on PCIe 6.0.
    "gb300-nvl72": NVLinkRack(
        PCIeTree(
            sockets=2, switches=4, ports=1, gpus_per_port=1, nics_per_port=1,
            lanes=PCIE6, port=100 * _GB, peer=40 * _GB, memory=512 * _GB,
        ),
        900 * _GB,
        reduces=True,
    ),
    # Amazon EC2 p3.16xlarge: NVLinks as in a DGX-1, one network interface of 25 Gb/s at the host (EC2 user guide). How
    # GPUs hang on PCIe is not published: taken over from the DGX-1.
    "p3.16xlarge": NVLinkMesh(
        PCIeTree(
            sockets=2, switches=4, ports=1, gpus_per_port=2, nics_per_port=0, shared=1,
            lanes=PCIE3, port=3.125 * _GB, peer=6 * _GB, memory=76.8 * _GB,
        ),
        25 * _GB,
    ),
    "eflops": eflops(),
    "eflops-baseline": eflops_baseline(),
}  # fmt: skip
SERVERS = tuple(_SERVERS)
"""The names that `preset` knows."""


def preset(name: str) -> Server:
    """Return the server called ``name``; ConfigError lists near names."""
    if (key := name.lower().replace("_", "-")) not in _SERVERS:
        raise unknown("server", name, SERVERS)
    return _SERVERS[key]
