"""Servers, which stand between a GPU and the network. `preset` knows real ones by name.

Rates are one direction. NVLink and network are the datasheets' nominal rates; PCIe is payload (see
`foretrain.network.servers.pcie`); memory is channels times transfer rate of the CPU's datasheet; what GPUs get between
sockets is what NCCL reckons with (``src/graph/topo.h``: BDW_QPI_BW, AMD_ZEN12_BW, SRP_QPI_BW).
"""

from __future__ import annotations

from foretrain.errors import unknown
from foretrain.network.servers.nvlink import NVLinkMesh, NVSwitch
from foretrain.network.servers.pcie import (
    PCIE3,
    PCIE4,
    PCIE5,
    Host,
    PCIeTree,
    Server,
    ServerPorts,
    eflops,
    eflops_baseline,
)

__all__ = ["SERVERS", "Host", "NVLinkMesh", "NVSwitch", "PCIeTree", "Server", "ServerPorts", "preset"]

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
