"""Servers whose GPUs are linked by NVLink besides PCIe: through NVSwitches, or pair by pair in a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from foretrain.errors import ConfigError
from foretrain.network.servers.pcie import NVLINK, NVLINK_LATENCY, PCIeTree, ServerPorts
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
        switch = build.node(f"s{index}.nvswitch", "nvswitch", server=index, reduces=self.reduces)
        for gpu in ports.ranks:
            build.cable(gpu, switch, rate=self.nvlink, latency=NVLINK_LATENCY, metric=NVLINK)
        return ports


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
