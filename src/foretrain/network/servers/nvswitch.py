"""NVSwitch: every GPU reaches every other of its server at the full rate of its NVLinks."""

from __future__ import annotations

from dataclasses import dataclass

from foretrain.network.servers.pcie import NVLINK, NVLINK_LATENCY, PCIeTree, ServerPorts
from foretrain.network.topology.graph import Builder


@dataclass(frozen=True, slots=True)
class NVSwitch:
    """A PCIe tree whose GPUs are linked by NVSwitches besides.

    The NVSwitches of a server are drawn as one node with one fat link to each GPU, because each GPU spreads its links
    evenly over them and they do not block.

    Attributes:
        tree: GPUs, NICs and what is above them.
        nvlink: bytes/s of all NVLinks of one GPU, in one direction.
        reduces: whether the switch sums what passes through it (NVLS, since the third generation).
    """

    tree: PCIeTree
    nvlink: float
    reduces: bool = False

    @property
    def gpus(self) -> int:
        """Ranks in it."""
        return self.tree.gpus

    @property
    def nics(self) -> int:
        """Cables to the fabric."""
        return self.tree.nics

    @property
    def port(self) -> float | None:
        """Bytes/s of each NIC's cable."""
        return self.tree.port

    def add(self, build: Builder, index: int) -> ServerPorts:
        """Adds the tree, and ``s<index>.nvswitch``."""
        ports = self.tree.add(build, index)
        switch = build.node(f"s{index}.nvswitch", "nvswitch", server=index, reduces=self.reduces)
        for gpu in ports.ranks:
            build.cable(gpu, switch, rate=self.nvlink, latency=NVLINK_LATENCY, metric=NVLINK)
        return ports
