"""EFLOPS' server and the one it is compared with (Dong et al., HPCA'20).

The baseline hangs all GPUs below one PCIe switch and one NIC on the root complex, where host memory and storage are as
well: k GPUs share min(PCIe, NIC), and copies of input data compete with them. EFLOPS puts a NIC beside each GPU under
the same PCIe switch, so that gradients never reach a root complex.

The paper's parts list was not to be had: counts and rates below are ours, for 2019, and every one can be changed.
"""

from __future__ import annotations

from foretrain.network.servers.pcie import CABLE, PCIE3, PCIeTree

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
