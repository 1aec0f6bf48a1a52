"""A topology as rows of plain values, what its files hold: texts with units for times and rates, names for nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from foretrain.errors import ConfigError, unknown
from foretrain.network.topology.graph import ENDS, Builder, Node, Topology
from foretrain.network.topology.notation import latency
from foretrain.units import exact_rate, exact_time, parse_rate

Row: TypeAlias = dict[str, Any]  # Any: what a file holds is checked key by key below

_NODE = {
    "name": str,
    "kind": str,
    "server": int,
    "tier": int,
    "forwards": bool,
    "reduces": bool,
    "bundle": str,
    "slowdown": float,
}
_ENDS = {"between": list, "from": str, "to": str}
_LINK = {"rate": str, "latency": str, "metric": int, "up": bool, "background": str}
_WORDS = {
    str: ("a text", "'100Gbps'"),
    int: ("a whole number", "1"),
    bool: ("true or false", "true"),
    float: ("a number", "1.2"),
    list: ("two names", "['host0', 'switch']"),
}


# From rows.


def built(
    name: str, nodes: Sequence[Row], links: Sequence[Row], ranks: Sequence[str] | None, symmetric: bool
) -> Topology:
    """The topology of these rows; ranks are all GPUs, or else all hosts, where none are named."""
    build = Builder(name)
    index: dict[str, int] = {}
    for number, row in enumerate(nodes):
        fields = typed(row, f"nodes[{number}]", _NODE, ("name", "kind"))
        if (node := fields.pop("name")) in index:
            raise ConfigError(f"nodes[{number}].name", node, "is the name of two nodes", "give each its own")
        index[node] = build.node(node, fields.pop("kind"), **fields)
    for number, row in enumerate(links):
        where = f"links[{number}]"
        fields = typed(row, where, _ENDS | _LINK, ("rate", "latency"))
        ways, values = ends(fields, where), link_values(fields, where)
        for a, b in ways:
            for end in (a, b):
                if end not in index:
                    raise unknown(where, end, index)
            build.link(index[a], index[b], **values)
    return build.topology(_ranks(build.nodes, index, ranks), symmetric=symmetric)


def _ranks(nodes: Sequence[Node], index: Mapping[str, int], ranks: Sequence[str] | None) -> list[int]:
    if ranks is None:
        gpus = [i for i, node in enumerate(nodes) if node.kind == "gpu"]
        return gpus or [i for i, node in enumerate(nodes) if node.kind == "host"]
    for rank in ranks:
        if rank not in index:
            raise unknown("ranks", rank, index)
    return [index[rank] for rank in ranks]


def ends(row: Row, where: str) -> list[tuple[str, str]]:
    """The directions that a row speaks of: both of ``between``, or the one of ``from`` and ``to``."""
    if "between" in row and not {"from", "to"} & row.keys():
        pair = row["between"]
        if len(pair) != 2 or not all(isinstance(end, str) for end in pair):
            raise ConfigError(f"{where}.between", pair, "is not two names", "write e.g. ['host0', 'switch']")
        return [(pair[0], pair[1]), (pair[1], pair[0])]
    if row.keys() >= {"from", "to"} and "between" not in row:
        return [(row["from"], row["to"])]
    given = sorted({"between", "from", "to"} & row.keys())
    raise ConfigError(where, given, "does not say between which nodes", "write between = ['a', 'b'], or from and to")


def link_values(row: Row, where: str) -> dict[str, Any]:
    """The attributes of a link in the units of `Builder.link`."""
    values = {key: row[key] for key in ("metric", "up") if key in row}
    if not 1 <= values.get("metric", 1) < 1 << 31:
        raise ConfigError(f"{where}.metric", values["metric"], "is not between 1 and 2^31 - 1", "write e.g. 1")
    for key in ("rate", "background"):
        if key in row:
            values[key] = parse_rate(row[key], f"{where}.{key}")
    if "latency" in row:
        values["latency"] = latency(row["latency"], f"{where}.latency")
    return values


def typed(row: object, where: str, types: Mapping[str, type], required: Sequence[str] = ()) -> Row:
    """``row`` with whole numbers made floats where one is wanted; ConfigError for a wrong key or kind of value."""
    if not isinstance(row, dict):
        raise ConfigError(where, row, "is not a table", "write e.g. { name = 'host0', kind = 'host' }")
    fields: Row = {}
    for key, value in row.items():
        if key not in types:
            raise unknown(where, key, types)
        number = types[key] is float and isinstance(value, int) and not isinstance(value, bool)
        if not number and type(value) is not types[key]:
            words, example = _WORDS[types[key]]
            example = "'500ns'" if key == "latency" else example
            raise ConfigError(f"{where}.{key}", value, f"is not {words}", f"write e.g. {example}")
        fields[key] = float(value) if number else value
    for key in required:
        if key not in fields:
            raise ConfigError(f"{where}.{key}", None, "is missing", f"say its {key}")
    return fields


CHANGE = _ENDS | _LINK
"""What a row of changes may hold."""


# To rows.


def node_rows(topology: Topology) -> Iterator[Row]:
    """A row for each node, without what is so by default."""
    usual = Node("", "switch")
    for node in topology.nodes:
        row: Row = {"name": node.name, "kind": node.kind}
        if node.forwards != (node.kind not in ENDS):
            row["forwards"] = node.forwards
        for key in ("server", "tier", "reduces", "bundle", "slowdown"):
            if (value := getattr(node, key)) != getattr(usual, key):
                row[key] = value
        yield row


def link_rows(topology: Topology) -> Iterator[Row]:
    """A row for each cable, or for each link between nodes whose two directions differ."""
    found: defaultdict[tuple[int, int], list[Row]] = defaultdict(list)
    for link in range(topology.links):
        found[int(topology.source[link]), int(topology.target[link])].append(_link_row(topology, link))
    for (a, b), rows in found.items():
        names = topology.nodes[a].name, topology.nodes[b].name
        if found.get((b, a)) != rows:
            for row in rows:
                yield {"from": names[0], "to": names[1]} | row
        elif a < b:
            for row in rows:
                yield {"between": list(names)} | row


def _link_row(topology: Topology, link: int) -> Row:
    row: Row = {"rate": exact_rate(topology.rate[link]), "latency": exact_time(int(topology.latency[link]))}
    if topology.metric[link] != 1:
        row["metric"] = int(topology.metric[link])
    if not topology.up[link]:
        row["up"] = False
    if topology.background[link]:
        row["background"] = exact_rate(topology.background[link])
    return row
