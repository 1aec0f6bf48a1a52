"""Topologies as text: ``"fat_tree:8@100Gbps"``, ``"bigraph:8x4,server=eflops"``, ``"dgx-h100:16"``, or a file's path.

KIND:SHAPE[@RATE][,OPTION...]       a fabric; RATE is that of a place's cables, and a server's own where left out
SERVER:COUNT[@RATE][,OPTION...]     that many servers of one kind, rail-optimised
PATH.toml, PATH.graphml             see `foretrain.network.topology.file`

star:HOSTS                fat_tree:K              leaf_spine:LEAVESxHOSTS       bigraph:SWITCHESxHOSTS
torus:4x4x4               dragonfly:AxPxH         rail:SERVERS

latency=T    server=NAME    oversubscription=R    spines=K    unit=SERVERS
"""

from __future__ import annotations

import re
from typing import Any

from foretrain.errors import ConfigError
from foretrain.network.fabrics import COUNTS, FABRICS, Fabric, build, fabric_name
from foretrain.network.servers import SERVERS
from foretrain.network.topology.file import load
from foretrain.network.topology.graph import Topology

_EXAMPLES = "write e.g. 'fat_tree:8@100Gbps', 'bigraph:8x4,server=eflops' or 'dgx-h100:16'"


def topology(text: str | Topology) -> Topology:
    """Return the topology that ``text`` describes: the notation above, or the path of a file.

    Raises:
        ConfigError: what is wrong in ``text``, or in the file, and what to write instead.
    """
    if isinstance(text, Topology):
        return text
    if not isinstance(text, str):
        raise ConfigError("topology", text, "is not a text", _EXAMPLES)
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
