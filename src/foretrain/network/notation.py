"""Clusters as text: ``"4x8xV100@100Gbps,ps=2"``, presets such as ``"dgx-h100:16"``, topologies, and TOML files.

WORKERS[xGPUS[xDEVICE]] @ RATE[/RATE] [,OPTION...]        "4 workers @ 1Gbps" is read as well

rate         a host's rate, or its sending/receiving rates
ps=K         K dedicated parameter servers; ps alone means as many as workers; ps=colocated puts one on each worker
all_reduce   ring all-reduce (the default)
latency=T    overhead=T    floor=T    local=RATE    server=RATE

TOPOLOGY [,OPTION...]      e.g. "bigraph:8x4@100Gbps,collective=hdrm": see `foretrain.network.deployment_notation`
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from foretrain import device
from foretrain.errors import ConfigError, unknown
from foretrain.network.switch_cluster import Cluster
from foretrain.units import parse_rate, parse_time

if TYPE_CHECKING:
    from foretrain.network.deployment import Deployment

Place: TypeAlias = Union[Cluster, "Deployment"]
"""Cluster on which a job runs: the simple one, or a topology."""

_COUNT = r"[0-9]{1,9}"
_RATE = r"[\d.]+\s*[A-Za-z]+(?:/s)?"
_SHAPE = re.compile(
    rf"(?P<workers>{_COUNT})(?:\s*[x×]\s*(?P<gpus>{_COUNT}))?"
    r"(?:\s*[x×]\s*(?P<device>[A-Za-z0-9][\w-]*))?(?:\s+workers?)?"
    rf"\s*@\s*(?P<up>{_RATE})(?:\s*/\s*(?P<down>{_RATE}))?"
)
DEPLOYMENT_OPTIONS = ("collective", "routing", "step", "ranks")
"""Options that only a job on a topology has."""
_EXAMPLE = "write e.g. '4x8xV100@100Gbps', '4x1xV100@10Gbps,ps=2' or 'dgx-h100:16'"
DEFAULT_DEVICE = "V100"
"""The GPU of a cluster that does not name one."""
PRESETS: dict[str, dict[str, Any]] = {
    # One 100 Gb/s InfiniBand adapter per pair of GPUs (DGX-1 V100: 4; A100: 8 × 200; H100: 8 × 400), NVIDIA datasheets.
    "dgx-v100": {"gpus": 8, "device": "V100", "rate": "400Gbps"},
    "dgx-a100": {"gpus": 8, "device": "A100", "rate": "1600Gbps"},
    "dgx-h100": {"gpus": 8, "device": "H100", "rate": "3200Gbps"},
    # Amazon EC2 p3.16xlarge: 8 V100, 25 Gb/s Ethernet.
    "p3.16xlarge": {"gpus": 8, "device": "V100", "rate": "25Gbps"},
    # ByteScheduler, SOSP'19 §6.1: 8 V100 a machine, 100 Gb/s RoCE.
    "bytescheduler": {"gpus": 8, "device": "V100", "rate": "100Gbps"},
}


def cluster(text: str | Place) -> Place:
    """Return the cluster or deployment that ``text`` describes.

    ``text`` is the notation above, a preset, a topology, or the path of a TOML or GraphML file.

    A preset such as ``"dgx-h100:16"`` is the simple cluster; with an option of a deployment (``collective=auto``) it
    has its servers' and its fabric's links one by one.
    """
    if isinstance(text, Cluster) or (not isinstance(text, str) and hasattr(text, "topology")):
        return text
    if not isinstance(text, str):
        raise ConfigError("cluster", text, "is not a text", _EXAMPLE)
    if _has_topology(text):
        from foretrain.network.deployment_notation import deployment

        return deployment(text)
    if text.endswith(".toml"):
        return load(text)
    return _simple(text)


def _has_topology(text: str) -> bool:
    """Return whether ``text`` is a topology, which takes an import of half a second to read."""
    head, *options = [part.strip() for part in text.split(",")]
    if head.endswith((".toml", ".graphml")):
        return head.endswith(".graphml") or bool(options) or _describes_topology(head)
    if any(option.partition("=")[0].strip() in DEPLOYMENT_OPTIONS for option in options):
        return not re.match(r"\d", head)
    name = head.partition("@")[0].partition(":")[0].strip().lower()
    return ":" in head and name not in PRESETS and not re.match(r"\d", name)


def _describes_topology(path: str) -> bool:
    """Return whether a TOML file has keys that only a topology has; `load` refuses a file that cannot be read."""
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return "kind" in found or "nodes" in found


def _simple(text: str) -> Cluster:
    head, *options = [part.strip() for part in text.split(",")]
    name, _, count = head.partition(":")
    if "@" not in head:
        if name.lower() not in PRESETS and not re.match(r"\d", name):
            raise unknown("cluster", name, PRESETS)
        if name.lower() not in PRESETS or not re.fullmatch(_COUNT, count):
            missing = "how many servers" if name.lower() in PRESETS else "how fast a link is"
            raise ConfigError("cluster", text, f"does not say {missing}", _EXAMPLE)
        fields = PRESETS[name.lower()] | {"workers": int(count)}
    else:
        match = _SHAPE.fullmatch(head)
        if match is None:
            raise ConfigError("cluster", text, "is not a cluster", _EXAMPLE)
        texts = {key: value for key, value in match.groupdict().items() if value}
        fields = texts | {key: int(texts[key]) for key in ("workers", "gpus") if key in texts}
    try:
        return _build(fields | _options(options, fields))
    except ConfigError as error:
        raise error.at(f"cluster {text!r}") from None


def preset(name: str, servers: int, *, parameter_servers: int = 0, **changes: Any) -> Cluster:
    """Return ``servers`` servers of a named kind.

    Args:
        name: one of `PRESETS`.
        servers: how many of them train.
        parameter_servers: dedicated hosts with parameters besides; 0 for all-reduce.
        changes: keys of a TOML file, e.g. ``rate="25Gbps"`` or ``exchange="ps_colocated"``.
    """
    if name.lower() not in PRESETS:
        raise unknown("cluster", name, PRESETS)
    dedicated = {"exchange": "ps", "servers": parameter_servers} if parameter_servers else {}
    return _build(PRESETS[name.lower()] | {"workers": servers} | dedicated | changes)


def load(path: str | Path) -> Cluster:
    """Return the cluster in a TOML file with the keys of `Cluster` (``rate`` sets both ``up`` and ``down``)."""
    try:
        fields = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        return _build(fields)
    except ConfigError as error:
        raise error.at(str(path)) from None
    except OSError as error:
        raise ConfigError(
            "cluster", str(path), f"cannot be read ({error.strerror})", "give the path of a file"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(path), "TOML", f"does not parse ({error})", "mend that line") from None


def _options(options: list[str], fields: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for option in options:
        key, _, value = (part.strip() for part in option.partition("="))
        if key in ("all_reduce", "allreduce", "ps"):
            new = _exchange(key, value, fields)
        elif key == "server":
            new = {"server_rate": value}
        elif key == "rate" and "up" in fields:
            raise ConfigError("rate", value, "contradicts the rate after '@'", "give it once")
        elif key in ("latency", "overhead", "floor", "local", "rate"):
            new = {key: value}
        else:
            raise unknown(
                "option", key, ("all_reduce", "ps", "latency", "overhead", "floor", "local", "server", "rate")
            )
        if clash := [name for name in new if name in found]:
            raise ConfigError(clash[0], option, "contradicts an option before it", "give each once")
        found |= new
    return found


def _exchange(key: str, value: str, fields: dict[str, Any]) -> dict[str, Any]:
    if key != "ps":
        if value:
            raise ConfigError(key, value, "is no setting of a ring", f"write {key} alone")
        return {"exchange": "all_reduce"}
    if value in ("colocated", "co-located", "ps_colocated"):
        return {"exchange": "ps_colocated"}
    if value and not re.fullmatch(_COUNT, value):
        raise ConfigError("ps", value, "is not a number of servers", "write ps=2 or ps=colocated")
    return {"exchange": "ps", "servers": int(value) if value else fields["workers"]}


def _build(fields: dict[str, Any]) -> Cluster:
    """Build a cluster from border types: texts with units become numbers, and unknown keys are refused."""
    known = {field.name for field in dataclasses.fields(Cluster)} - {"cpu"}
    inside: dict[str, Any] = {}
    if "rate" in fields:  # first, so that up and down refine it wherever they stand
        inside["up"] = inside["down"] = parse_rate(fields["rate"], "rate")
    for key, value in fields.items():
        if key == "rate":
            continue
        if key not in known:
            raise unknown("key", key, known | {"rate"})
        if key in ("up", "down", "server_rate", "local"):
            inside[key] = parse_rate(value, key)
        elif key in ("latency", "overhead", "floor"):
            inside[key] = parse_time(value, key)
        else:
            inside[key] = value
    if "workers" not in inside:
        raise ConfigError("workers", None, "is missing", "say how many hosts, e.g. workers = 4")
    if "up" not in inside:
        raise ConfigError("rate", None, "is missing", "say how fast a host's link is, e.g. rate = '10Gbps'")
    inside.setdefault("down", inside["up"])
    gpus = inside.get("gpus", 1)
    if isinstance(gpus, int) and gpus > 1 and "local" not in inside:
        inside["local"] = device.preset(inside.get("device") or DEFAULT_DEVICE).local_rate
    elif "device" in inside:
        device.preset(inside["device"])
    return Cluster(**inside)
