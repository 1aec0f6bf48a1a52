"""Topologies as text, and jobs on them: a topology, and what else a deployment has.

    KIND:SHAPE[@RATE][,OPTION...]     a fabric; RATE is that of a place's cables, and a server's own where left out
    SERVER:COUNT[@RATE][,OPTION...]   that many servers of one kind, rail-optimised
    PATH.toml, PATH.graphml           see `foretrain.network.topology.file`

    star:HOSTS                fat_tree:K              leaf_spine:LEAVESxHOSTS       bigraph:SWITCHESxHOSTS
    torus:4x4x4               dragonfly:AxPxH         rail:SERVERS

    latency=T    server=NAME    oversubscription=R    spines=K    unit=SERVERS

A job's deployment is a topology, its options included, with

    [,collective=NAME] [,routing=NAME] [,device=GPU] [,ranks=A-B] [,overhead=T] [,step=T] [,seed=N]

Examples: ``"fat_tree:8@100Gbps,oversubscription=2,routing=spray"``, ``"bigraph:8x4,server=eflops,collective=hdrm"``,
``"dgx-h100:4,collective=nccl"``, ``"mine.toml,ranks=0-7"``.

A simple cluster, or a single GPU, as a job on a topology: what a live simulation runs on.

deployment_of(cluster("4x8xV100@100Gbps"))        4 servers on one switch, in each 8 GPUs on one switch
single("H100")                                    one GPU, which exchanges nothing

What a live simulation runs on is any of these: "dgx-h100:2,ranks=0-11", "4x8xA100@100Gbps" or "H100"; see `equipped`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretrain import device
from foretrain.collective.nccl.generation import GPUS
from foretrain.device import calibration, preset
from foretrain.device.presets import preset_names
from foretrain.errors import ConfigError
from foretrain.network.deployment import Deployment
from foretrain.network.fabrics import COUNTS, FABRICS, Fabric, build, fabric_name
from foretrain.network.fabrics.clos import star
from foretrain.network.notation import PRESETS, cluster
from foretrain.network.servers import SERVERS, Host, NVSwitch, PCIeTree, Server
from foretrain.network.switch_cluster import Cluster
from foretrain.network.topology.file import load
from foretrain.network.topology.graph import Topology
from foretrain.units import parse_time

_TOPOLOGIES = "write e.g. 'fat_tree:8@100Gbps', 'bigraph:8x4,server=eflops' or 'dgx-h100:16'"


def topology(text: str | Topology) -> Topology:
    """Return the topology that ``text`` describes: the notation above, or the path of a file.

    Raises:
        ConfigError: what is wrong in ``text``, or in the file, and what to write instead.
    """
    if isinstance(text, Topology):
        return text
    if not isinstance(text, str):
        raise ConfigError("topology", text, "is not a text", _TOPOLOGIES)
    if text.endswith((".toml", ".graphml")):
        return load(text)
    try:
        return build(*_parse(text))
    except ConfigError as error:
        raise error.at(f"topology {text!r}") from None


def _parse(text: str) -> tuple[str, dict[str, Any]]:
    head, *options = [part.strip() for part in text.split(",")]
    place, at, rate = (part.strip() for part in head.partition("@"))
    kind, _, shape = (part.strip() for part in place.partition(":"))
    values: dict[str, Any] = {}
    example = ""
    if kind.lower().replace("_", "-") in SERVERS[1:]:
        values["server"], kind, example = kind, "rail", f"{kind}:16"
    fabric = FABRICS[fabric_name(kind)]
    values |= _shape(fabric, shape, example or fabric.example)
    if at:
        values["rate"] = rate
    for option in options:
        key, equals, value = (part.strip() for part in option.partition("="))
        if not equals:
            raise ConfigError("option", option, "has no value", "write e.g. latency=500ns")
        if key in values:
            raise ConfigError(key, value, "is said twice", "give it once")
        values[key] = _number(value) if key in COUNTS or key == "oversubscription" else value
    return kind, values


def _shape(fabric: Fabric, text: str, example: str) -> dict[str, Any]:
    """Return the numbers after the colon, by their parameters' names."""
    sizes = re.split(r"\s*[x×]\s*", text)
    if not all(re.fullmatch("[0-9]{1,9}", size) for size in sizes):
        raise ConfigError("shape", text, "is not a row of whole numbers", f"write e.g. '{example}'")
    numbers = [int(size) for size in sizes]
    if fabric.shape == ("shape",):
        return {"shape": numbers}
    if len(numbers) != len(fabric.shape):
        wanted = "x".join(name.upper() for name in fabric.shape)
        raise ConfigError("shape", text, f"is not {wanted}", f"write e.g. '{example}'")
    return dict(zip(fabric.shape, numbers, strict=True))


def _number(text: str) -> int | float | str:
    """Return a number where it is one; else the text, which the parameter's own check refuses."""
    if re.fullmatch("[0-9]{1,9}", text):
        return int(text)
    return float(text) if re.fullmatch(r"[0-9]{1,9}\.[0-9]{1,9}", text) else text


_OWN = ("collective", "routing", "device", "ranks", "overhead", "step", "seed")
# The GPU in each server known by name; a host is whatever `device` says.
_GPU = re.compile(r"(?:^|server=)(?:dgx-([a-z]+[0-9]+)|(gb[0-9]+)-nvl72|(p3\.16xlarge))", re.IGNORECASE)
_EXAMPLES = "dgx-h100:16, 4x8xA100@100Gbps or H100; foretrain topology lists servers, foretrain catalog GPUs"
_ANOTHER = "measure there, or name another cluster, e.g. star:16@100Gbps"
_SINGLE = re.compile(r"(?:1[x×]){0,2}([A-Za-z][\w-]*)(?:@.*)?")
"""A GPU's name; or a cluster of one server with one of them, whose network does not matter."""


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
        fields["device"] = "V100" if found[3] else (found[1] or found[2]).upper()
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


def place(text: str) -> Deployment:
    """Return the cluster that ``text`` describes, whose collectives NCCL chooses unless it says ``collective=``.

    Raises:
        ConfigError: ``text`` is no cluster, or does not name its GPUs.
    """
    return equipped(text)[0]


def equipped(text: str, device: str | None = None) -> tuple[Deployment, Path | None]:
    """Return the cluster that ``text`` describes with other devices, and the file of their measurements, if any.

    Args:
        text: the cluster.
        device: a preset, or a file that ``foretrain calibrate`` wrote; None leaves what the cluster has. Where one
            processor computes and communicates, collectives are Gloo's rings.

    Raises:
        ConfigError: as `place`, or the file is of other devices than the cluster's.
    """
    where, path, chosen = _described(text), None, "nccl"
    if device is not None:
        path = Path(device) if device.endswith(".json") or Path(device).is_file() else None
        gpu = calibration.load(path).described() if path else preset(device)
        if where.device and path and preset(where.device).product != gpu.product:
            raise ConfigError("device", device, f"is of '{gpu.product}', not of the cluster's {where.device}", _ANOTHER)
        where = dataclasses.replace(where, device=gpu.name, _memo={})
        chosen = "ring" if gpu.serial else "nccl"
    if where.device is None:
        raise ConfigError("cluster", text, "does not say which GPUs it has", "add e.g. ',device=H100'")
    return where if "collective=" in text else dataclasses.replace(where, collective=chosen, _memo={}), path


_FAULT = re.compile(r"(link|gpu):([^=]+)=(down|[0-9]{1,3}(?:\.[0-9]{1,6})?%)")
_FAULTS = (
    "write e.g. link:unit0.rail0-s0.nic0=10%, link:unit0.rail0-s0.nic0=down or gpu:s0.gpu3=80%; "
    "foretrain topology show names nodes"
)


def with_faults(where: Deployment, faults: Sequence[str]) -> Deployment:
    """Return the cluster with links that carry, or GPUs that compute, only this much of what they should.

    Args:
        where: the cluster.
        faults: e.g. ``"link:unit0.rail0-s0.nic0=10%"``, both ways; ``"link:unit0.rail0-s0.nic0=down"``;
            ``"gpu:s0.gpu3=80%"``.

    Raises:
        ConfigError: a fault is written wrongly, or names what the cluster does not have.
    """
    made = where.topology
    for text in faults:
        match = _FAULT.fullmatch(text.strip())
        part = 0.0 if match is None or match[3] == "down" else float(match[3][:-1]) / 100
        if match is None or part > 1 or (match[1] == "gpu" and not part):
            raise ConfigError("fault", text, "is no fault", _FAULTS)
        try:
            made = made.straggling({match[2]: 1 / part}) if match[1] == "gpu" else _degraded(made, match[2], part)
        except ConfigError as error:
            raise error.at(f"fault {text!r}") from None
        if match[1] == "gpu" and match[2] not in (own := [made.nodes[made.ranks[rank]].name for rank in where.members]):
            known = f"{own[0]} to {own[-1]}" if len(own) > 1 else own[0]
            raise ConfigError("fault", text, "is of a GPU without a rank of the job", f"the job has {known}")
    return dataclasses.replace(where, topology=made, _memo={})


def _degraded(made: Topology, ends: str, part: float) -> Topology:
    """Return the topology with ``part`` of the rate on all links between two nodes; 0 takes them down."""
    names = {node.name for node in made.nodes}
    cuts = [(ends[:at], ends[at + 1 :]) for at, letter in enumerate(ends) if letter == "-"]
    found = next((cut for cut in cuts if names.issuperset(cut)), cuts[0] if cuts else (ends, ""))
    for source, target in (found, found[::-1]):
        links = made.between(source, target)
        made = made.changed(links, rate=float(made.rate[links[0]]) * part) if part else made.changed(links, up=False)
    return dataclasses.replace(made, faulty_links=True)


def _described(text: str) -> Deployment:
    if not isinstance(text, str):
        raise ConfigError("cluster", text, "is no text", f"write e.g. {_EXAMPLES}")
    head = text.partition(",")[0].strip()
    name = head.partition(":")[0].strip().lower()
    if head == text.strip() and (match := _SINGLE.fullmatch(head)):
        if match[1].lower() not in map(str.lower, preset_names()):
            raise ConfigError("cluster", text, "is neither a GPU nor a cluster", f"write e.g. {_EXAMPLES}")
        return single(match[1])
    if re.match(r"\d", head) or head.endswith(".toml") or (name in PRESETS and name not in SERVERS):
        found = cluster(text)
        return deployment_of(found) if isinstance(found, Cluster) else found
    return deployment(text, alone=True)
