"""Fabrics: what stands between servers. One per module, each a function from few numbers to a `Topology`.

Every fabric has places. Without a ``server`` a place holds a host that is one rank; with one it holds that server, all
NICs of which are plugged in there, and each link between switches is as many times faster as a server has NICs, so that
a fabric blocks as much as it does with hosts. ``rail`` alone plugs the NICs of a server into different switches.

`FABRICS` lists them by name, and `build` makes one from the values of a file or a text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from foretrain.errors import ConfigError, unknown
from foretrain.network.fabrics.clos import bigraph, fat_tree, leaf_spine, rail, star
from foretrain.network.fabrics.direct import dragonfly, torus
from foretrain.network.servers import SERVERS, Server, preset
from foretrain.network.topology.graph import Topology
from foretrain.units import SECOND, parse_rate, parse_time


@dataclass(frozen=True, slots=True)
class Fabric:
    """Entry of `FABRICS`: a fabric's function and notation.

    Attributes:
        build: what makes it.
        shape: the parameters that stand after the colon.
        options: the parameters besides that it has of its own.
        places: how many places a shape has, without oversubscription.
        example: one of them.
    """

    build: Callable[..., Topology]
    shape: tuple[str, ...]
    options: tuple[str, ...]
    places: Callable[..., int]
    example: str


FABRICS: Mapping[str, Fabric] = {
    "star": Fabric(star, ("hosts",), (), lambda hosts: hosts, "star:16@100Gbps"),
    "fat_tree": Fabric(fat_tree, ("k",), ("oversubscription",), lambda k: k**3 // 4, "fat_tree:8@100Gbps"),
    "leaf_spine": Fabric(
        leaf_spine,
        ("leaves", "hosts"),
        ("spines", "oversubscription"),
        lambda leaves, hosts: leaves * hosts,
        "leaf_spine:8x8@100Gbps,oversubscription=2,spines=4",
    ),
    "bigraph": Fabric(
        bigraph, ("switches", "hosts"), (), lambda switches, hosts: switches * hosts, "bigraph:8x4@100Gbps"
    ),
    "rail": Fabric(
        rail, ("servers",), ("unit", "spines", "oversubscription"), lambda servers: servers, "rail:64,server=dgx-h100"
    ),
    "torus": Fabric(torus, ("shape",), (), lambda shape: math.prod(shape), "torus:4x4x4@100Gbps"),
    "dragonfly": Fabric(dragonfly, ("a", "p", "h"), (), lambda a, p, h: a * p * (a * h + 1), "dragonfly:4x2x2@100Gbps"),
}
"""By the name to write."""

MOST = 1 << 20
"""Ranks that a text may ask for: more would fill the memory before anything could be said about it."""

LONGEST = 3600 * SECOND
"""Latency of a link that is not a mistake of the unit."""

COUNTS = ("hosts", "k", "leaves", "switches", "servers", "a", "p", "h", "spines", "unit")
"""Parameters that are whole numbers."""


def build(kind: str, values: Mapping[str, Any]) -> Topology:
    """Build the fabric called ``kind`` from the texts and numbers of its parameters, as a file or a text holds them."""
    name = fabric_name(kind)
    fabric = FABRICS[name]
    known = (*fabric.shape, "rate", "latency", "server", *fabric.options)
    for key in values:
        if key not in known:
            raise unknown("key", key, known)
    for key in (*fabric.shape, *(("server",) if name == "rail" else ())):
        if key not in values:
            raise ConfigError(key, None, "is missing", f"write e.g. '{fabric.example}'")
    inside = {key: _value(key, value) for key, value in values.items()}
    _check_size(fabric, inside)
    return fabric.build(**inside)


def fabric_name(kind: str) -> str:
    """Return the key of `FABRICS` for ``kind``, in any case and with hyphens; ConfigError lists near names."""
    name = kind.lower().replace("-", "_")
    if name not in FABRICS:
        raise unknown("kind", kind, (*FABRICS, *SERVERS[1:]))
    return name


def _value(key: str, value: Any) -> Any:
    if key == "rate":
        return parse_rate(value, key)
    if key == "latency":
        return latency(value, key)
    if key == "server":
        if not isinstance(value, str):
            raise ConfigError(key, value, "is not the name of a server", f"write one of {', '.join(SERVERS)}")
        return preset(value)
    if key == "shape" and not (isinstance(value, list) and value):
        raise ConfigError(key, value, "is not a list of sizes", "write e.g. [4, 4, 4]")
    for number in value if key == "shape" else [value] if key in COUNTS else []:
        if not isinstance(number, int) or isinstance(number, bool):
            raise ConfigError(key, value, "is not a whole number", "write e.g. 4")
    return value


def latency(value: Any, field: str) -> int:
    """Parse a latency such as ``"500ns"``, an hour at most; return ps."""
    time = parse_time(value, field)
    if time > LONGEST:
        raise ConfigError(field, value, "is longer than an hour", "write e.g. '500ns'")
    return time


def _check_size(fabric: Fabric, values: Mapping[str, Any]) -> None:
    server: Server | None = values.get("server")
    ranks = fabric.places(*(values[key] for key in fabric.shape)) * (server.gpus if server else 1)
    if ranks > MOST:
        shape = "x".join(map(str, values["shape"] if "shape" in values else (values[key] for key in fabric.shape)))
        raise ConfigError(fabric.shape[0], shape, f"makes {ranks} ranks", f"stay below {MOST}")
