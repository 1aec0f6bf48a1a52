"""Jobs on topologies as text: a topology, and what else a deployment has.

    TOPOLOGY [,collective=NAME] [,routing=NAME] [,device=GPU] [,ranks=A-B] [,overhead=T] [,step=T] [,seed=N]

TOPOLOGY is what `foretrain.network.topology.notation` reads, its own options included. Examples:
``"fat_tree:8@100Gbps,oversubscription=2,routing=spray"``, ``"bigraph:8x4,server=eflops,collective=hdrm"``,
``"dgx-h100:4,collective=nccl"``, ``"mine.toml,ranks=0-7"``.

A simple cluster, or a single GPU, as a job on a topology: what a live simulation runs on.

deployment_of(cluster("4x8xV100@100Gbps"))        4 servers on one switch, in each 8 GPUs on one switch
single("H100")                                    one GPU, which exchanges nothing
"""

from __future__ import annotations

import re
from typing import Any

from foretrain import device
from foretrain.collective.nccl.generation import GPUS
from foretrain.errors import ConfigError
from foretrain.network.deployment import Deployment
from foretrain.network.fabrics.star import star
from foretrain.network.servers import Host, NVSwitch, PCIeTree, Server
from foretrain.network.switch_cluster import Cluster
from foretrain.network.topology.notation import topology
from foretrain.units import parse_time

_OWN = ("collective", "routing", "device", "ranks", "overhead", "step", "seed")
# The GPU in each server known by name; a host is whatever `device` says.
_GPU = re.compile(r"(?:dgx-|server=dgx-)([a-z]+[0-9]+)|(p3\.16xlarge)", re.IGNORECASE)


def deployment(text: str, *, alone: bool = False) -> Deployment:
    """Return the job on a topology that ``text`` describes; ``alone`` if a single rank will do.

    Raises:
        ConfigError: what is wrong, and what to write instead.
    """
    parts = [part.strip() for part in text.split(",")]
    own: dict[str, str] = {}
    for part in parts[1:]:
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key in _OWN:
            if key in own:
                raise ConfigError(key, value, "is said twice", "give it once").at(f"cluster {text!r}")
            own[key] = value
    rest = ",".join(part for part in parts if part.partition("=")[0].strip() not in _OWN)
    network = topology(rest)
    try:
        return Deployment(network, **_fields(own, rest), alone=alone)
    except ConfigError as error:
        raise error.at(f"cluster {text!r}") from None


def _fields(own: dict[str, str], topology_text: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in own.items():
        if key in ("overhead", "step"):
            fields[key] = parse_time(value, key)
        elif key == "ranks":
            fields[key] = _ranks(value)
        elif key == "seed":
            if not re.fullmatch("[0-9]{1,9}", value):
                raise ConfigError(key, value, "is not a whole number", "write e.g. seed=1")
            fields[key] = int(value)
        else:
            fields[key] = value
    if "device" not in fields and (found := _GPU.search(topology_text)):
        fields["device"] = "V100" if found[2] else found[1].upper()
    if "device" in fields and fields["device"].upper() not in GPUS:
        device.preset(fields["device"])
    return fields


def _ranks(text: str) -> tuple[int, ...]:
    """Parse ``"0-7"``, ``"0-3+8-11"`` or ``"5"``."""
    found: list[int] = []
    for part in text.split("+"):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part.strip())
        if match is None:
            raise ConfigError("ranks", text, "is not a list of ranks", "write e.g. 0-7 or 0-3+8-11")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ConfigError("ranks", text, "runs backwards", "write e.g. 0-7")
        found += range(first, last + 1)
    return tuple(found)


def deployment_of(cluster: Cluster) -> Deployment:
    """Return the deployment of a simple cluster: its servers around its switch, link by link.

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
    """Return the deployment of one GPU, a preset of `foretrain.device`, which exchanges nothing."""
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
