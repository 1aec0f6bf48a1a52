"""Clusters of a live simulation, as text: a topology, a simple cluster, or one GPU.

dgx-h100:16                     what `foretrain.network.deployment_notation` reads: servers and fabric link by link
dgx-h100:2,ranks=0-11           a part of it
4x8xA100@100Gbps                what `foretrain.network.notation` reads, on one switch
H100                            one GPU
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from foretrain.device import calibration, preset
from foretrain.device.presets import preset_names
from foretrain.errors import ConfigError
from foretrain.network.deployment import Deployment
from foretrain.network.deployment_notation import deployment, deployment_of, single
from foretrain.network.notation import PRESETS, cluster
from foretrain.network.servers import SERVERS
from foretrain.network.switch_cluster import Cluster

_EXAMPLES = "dgx-h100:16, 4x8xA100@100Gbps or H100; foretrain topology lists servers, foretrain catalog GPUs"
_ANOTHER = "measure there, or name another cluster, e.g. star:16@100Gbps"
_SINGLE = re.compile(r"(?:1[x×]){0,2}([A-Za-z][\w-]*)(?:@.*)?")
"""A GPU's name; or a cluster of one server with one of them, whose network does not matter."""


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


def _described(text: str) -> Deployment:
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
