"""Topologies in files: TOML, either a fabric and what is changed in it or every node and link, and GraphML.

    kind = "fat_tree"                       # a fabric of `foretrain.network.fabrics`, with its parameters
    k = 4
    rate = "100Gbps"
    changes = [                             # later ones win
      { between = ["pod0.edge0", "pod0.agg0"], up = false },
      { from = "pod1.agg0", to = "core0", rate = "10Gbps" },
      { between = ["pod2.agg1", "core2"], background = "40Gbps" },
    ]
    stragglers = { host3 = 1.2 }            # computes 20 % longer

    name = "pair"                           # or node by node
    symmetric = true                        # every link has its equal in the other direction; true where left out
    nodes = [
      { name = "a", kind = "host" },
      { name = "b", kind = "host" },
      { name = "s", kind = "switch", tier = 1 },
    ]
    links = [
      { between = ["a", "s"], rate = "10Gbps", latency = "500ns" },
      { between = ["b", "s"], rate = "10Gbps", latency = "500ns", metric = 2, up = true, background = "1Gbps" },
    ]
    ranks = ["a", "b"]                      # all GPUs, or else all hosts, where left out

`load` after `save` gives back exactly the same topology, in either format.

A topology as rows of plain values, what its files hold: texts with units for times and rates, names for nodes.

GraphML, through networkx: nodes and edges with the attributes that `foretrain.network.topology.file` writes in TOML.

A node's id is its name, an undirected edge a cable. Rates and latencies are texts with units, or numbers in bytes/s and
ps. A node's ``rank`` is the number of the rank on it; where no node has one, all GPUs, or else all hosts, are ranks.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from foretrain.errors import ConfigError, unknown
from foretrain.files import write_atomically
from foretrain.network.fabrics import build, latency
from foretrain.network.topology.graph import ENDS, Builder, Node, Topology
from foretrain.units import exact_rate, exact_time, parse_rate

_BOTH = ("changes", "stragglers")
_EXPLICIT = ("name", "symmetric", "nodes", "links", "ranks")


def load(path: str | os.PathLike[str]) -> Topology:
    """Load the topology in a ``.toml`` or ``.graphml`` file.

    Raises:
        ConfigError: names the file, the key, what stood there and what to write.
    """
    text = _read(path)
    try:
        if Path(path).suffix == ".graphml":
            return built(**_parse_graphml(text))
        return _topology(_toml(text))
    except ConfigError as error:
        raise ConfigError(f"{os.fspath(path)}: {error.field}", error.value, error.problem, error.remedy) from error


def save(topology: Topology, path: str | os.PathLike[str]) -> None:
    """Write ``topology`` to ``path``, as its ending says, whole or not at all."""
    check_format(path)
    write_atomically(path, _graphml(topology) if Path(path).suffix == ".graphml" else _text(topology))


def check_format(path: str | os.PathLike[str]) -> None:
    """Raise ConfigError where ``path`` does not end as a format does."""
    if Path(path).suffix not in (".toml", ".graphml"):
        raise ConfigError("path", os.fspath(path), "is neither .toml nor .graphml", "name the file e.g. mine.toml")


def _read(path: str | os.PathLike[str]) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError("topology", os.fspath(path), "is not UTF-8", "save the file as UTF-8") from error
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
        raise ConfigError("topology", os.fspath(path), problem, "give the path of a file") from error


def _toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError("TOML", str(error), "does not parse", "mend that line") from error


# Reading.


def _topology(table: dict[str, Any]) -> Topology:
    rest = {key: value for key, value in table.items() if key not in _BOTH}
    if "kind" in rest:
        kind = rest.pop("kind")
        if not isinstance(kind, str):
            raise ConfigError("kind", kind, "is not a text", "write e.g. 'fat_tree'")
        made = build(kind, rest)
    else:
        made = _explicit(rest)
    for number, row in enumerate(_list(table, "changes")):
        made = _changed(made, row, f"changes[{number}]")
    return _straggling(made, table.get("stragglers", {}))


def _explicit(table: Mapping[str, Any]) -> Topology:
    for key in table:
        if key not in _EXPLICIT:
            raise unknown("key", key, (*_EXPLICIT, *_BOTH, "kind"))
    for key, kind, words in (("name", str, "'mine'"), ("symmetric", bool, "true or false")):
        if type(table.get(key, kind())) is not kind:
            raise ConfigError(key, table[key], "is of the wrong kind", f"write {words}")
    if "nodes" not in table:
        raise ConfigError("nodes", None, "are missing", "list them, or say kind = 'fat_tree' or another")
    ranks = _list(table, "ranks") if "ranks" in table else None
    for rank in ranks or ():
        if not isinstance(rank, str):
            raise ConfigError("ranks", rank, "is not a name", "name the nodes that ranks sit on")
    return built(
        table.get("name", "topology"),
        _list(table, "nodes"),
        _list(table, "links"),
        ranks,
        table.get("symmetric", True),
    )


def _list(table: Mapping[str, Any], key: str) -> list[Any]:
    if not isinstance(table.get(key, []), list):
        raise ConfigError(key, table[key], "is not a list", f"write {key} = [...]")
    return table.get(key, [])


def _changed(made: Topology, row: object, where: str) -> Topology:
    fields = typed(row, where, CHANGE)
    ways, values = ends(fields, where), link_values(fields, where)
    if not values.keys() or "metric" in values:
        raise ConfigError(where, row, "changes nothing that can be", "say rate, latency, up or background")
    try:
        return made.changed([link for way in ways for link in made.between(*way)], **values)
    except ConfigError as error:
        raise error.at(where) from None


def _straggling(made: Topology, slowdown: object) -> Topology:
    if not isinstance(slowdown, dict):
        raise ConfigError("stragglers", slowdown, "is not a table", "write e.g. { host3 = 1.2 }")
    factors = {}
    for name, times in slowdown.items():
        if not isinstance(times, int | float) or isinstance(times, bool):
            raise ConfigError(f"stragglers.{name}", times, "is not a number", "write 1.2 for 20 %")
        factors[name] = float(times)
    return made.straggling(factors) if factors else made


# Writing.


def _text(topology: Topology) -> str:
    lines = [f"name = {_written(topology.name)}", f"symmetric = {_written(topology.symmetric)}", "", "nodes = ["]
    lines += [f"  {_inline(row)}," for row in node_rows(topology)]
    lines += ["]", "", "links = ["]
    lines += [f"  {_inline(row)}," for row in link_rows(topology)]
    lines += ["]", "", "ranks = ["]
    lines += [f"  {_written(topology.nodes[node].name)}," for node in topology.ranks]
    return "\n".join([*lines, "]", ""])


def _inline(row: Row) -> str:
    return "{ " + ", ".join(f"{key} = {_written(value)}" for key, value in row.items()) + " }"


def _written(value: object) -> str:
    # JSON's texts, lists, numbers and truth values are TOML's, except that TOML also wants DEL escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


Row: TypeAlias = dict[str, Any]  # Any: what a file holds is checked key by key below

_NODE = {
    "name": str, "kind": str, "server": int, "tier": int,
    "forwards": bool, "reduces": bool, "bundle": str, "slowdown": float, "host": int,
}  # fmt: skip
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
    """Build the topology of these rows; ranks are all GPUs, or else all hosts, where none are named."""
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
    """Return the directions that a row names: both of ``between``, or the one of ``from`` and ``to``."""
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
    """Return the attributes of a link in the units of `Builder.link`."""
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
    """Return ``row`` with whole numbers as floats where one is wanted; ConfigError for a wrong key or kind of value."""
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
"""Keys that a row of changes may hold."""


# To rows.


def node_rows(topology: Topology) -> Iterator[Row]:
    """Yield a row for each node, without defaults."""
    usual = Node("", "switch")
    for node in topology.nodes:
        row: Row = {"name": node.name, "kind": node.kind}
        if node.forwards != (node.kind not in ENDS):
            row["forwards"] = node.forwards
        for key in ("server", "host", "tier", "reduces", "bundle", "slowdown"):
            if (value := getattr(node, key)) != getattr(usual, key):
                row[key] = value
        yield row


def link_rows(topology: Topology) -> Iterator[Row]:
    """Yield a row for each cable, or for each link between nodes whose two directions differ."""
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


def _parse_graphml(text: str) -> dict[str, Any]:
    """Return the arguments of `built` for a GraphML text."""
    import xml.etree.ElementTree as ElementTree

    import networkx as nx

    try:
        # Keys of parallel edges are kept in the order of the file.
        graph = nx.parse_graphml(text, force_multigraph=True)
    except (ElementTree.ParseError, nx.NetworkXError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("GraphML", str(error), "does not parse", "write it with networkx.write_graphml") from error
    nodes: list[Row] = [dict(values) | {"name": str(node)} for node, values in graph.nodes(data=True)]
    ranked = sorted((row.pop("rank"), row["name"]) for row in nodes if isinstance(row.get("rank"), int))
    if [rank for rank, _ in ranked] != list(range(len(ranked))):
        raise ConfigError("rank", [rank for rank, _ in ranked][:8], "are not 0, 1, 2, ...", "number all ranks once")
    links = []
    for a, b, values in graph.edges(data=True):
        values.pop("id", None)
        between = {"from": str(a), "to": str(b)} if graph.is_directed() else {"between": [str(a), str(b)]}
        links.append(between | _with_units(values))
    return {
        "name": str(graph.graph.get("name") or "topology"),
        "nodes": nodes,
        "links": links,
        "ranks": [name for _, name in ranked] or None,
        "symmetric": _truth(graph.graph.get("symmetric", True)),
    }


def _with_units(values: dict[str, Any]) -> Row:
    row = {key: value for key, value in values.items() if key != "background" or value}
    for key, unit in (("rate", "B/s"), ("background", "B/s"), ("latency", "ps")):
        if isinstance(row.get(key), int | float):
            row[key] = f"{row[key]!r}{unit}"
    if "up" in row:
        row["up"] = _truth(row["up"])
    return row


def _truth(value: object) -> object:
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def _graphml(topology: Topology) -> str:
    """Return ``topology`` as GraphML."""
    import networkx as nx

    graph = nx.MultiDiGraph(name=topology.name, symmetric=topology.symmetric)
    for row in node_rows(topology):
        graph.add_node(row.pop("name"), **row)
    for rank, node in enumerate(topology.ranks.tolist()):
        graph.nodes[topology.nodes[node].name]["rank"] = rank
    for row in link_rows(topology):
        ways = row.pop("between", None)
        for a, b in [ways, ways[::-1]] if ways else [(row.pop("from"), row.pop("to"))]:
            graph.add_edge(a, b, **row)
    return "\n".join(nx.generate_graphml(graph)) + "\n"
