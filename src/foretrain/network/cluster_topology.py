"""A simple cluster, or a single GPU, as a job on a topology: what a live simulation runs on.

deployment_of(cluster("4x8xV100@100Gbps"))        4 servers on one switch, in each 8 GPUs on one switch
single("H100")                                    one GPU, which exchanges nothing
"""

from __future__ import annotations

from foretrain import device
from foretrain.errors import ConfigError
from foretrain.network.deployment import Deployment
from foretrain.network.fabrics.star import star
from foretrain.network.servers import Host, NVSwitch, PCIeTree, Server
from foretrain.network.switch_cluster import Cluster


def deployment_of(cluster: Cluster) -> Deployment:
    """The same servers around the same switch, link by link.

    The GPUs of a server reach each other at ``cluster.local``, the bus bandwidth of their all-reduce, and share one
    link to the switch; half of the latency is on each of the two links between servers. Where hosts send and receive
    at different rates, the lower is taken for both: collectives do both at once.

    Raises:
        ConfigError: the cluster has parameter servers, or does not say what its GPUs are.
    """
    if cluster.exchange != "all_reduce":
        raise ConfigError(
            "cluster", str(cluster), "has parameter servers, but a script calls collectives", "leave out the ps"
        )
    if cluster.device is None:
        raise ConfigError("cluster", str(cluster), "does not say which GPUs it has", "write e.g. 4x8xV100@100Gbps")
    rate = min(cluster.up, cluster.down)
    topology = star(cluster.workers, rate, latency=cluster.latency // 2, server=_server(cluster, rate))
    return Deployment(topology, device=cluster.device, overhead=cluster.overhead)


def single(gpu: str) -> Deployment:
    """One GPU, a preset of `foretrain.device`."""
    return Deployment(star(1, 1e9), device=device.preset(gpu).name, alone=True)


def _server(cluster: Cluster, rate: float) -> Server:
    if cluster.gpus == 1:
        return Host()
    # All that leaves the server crosses the link of its one switch, so that GPUs share the rate as in the simple form.
    tree = PCIeTree(
        sockets=1, switches=1, ports=1, gpus_per_port=cluster.gpus, nics_per_port=0, shared=1,
        lanes=rate, port=rate, peer=rate,
    )  # fmt: skip
    return NVSwitch(tree, cluster.local or device.preset(cluster.device or "").local_rate)
