"""GraphML, through networkx: nodes and edges with the attributes that `foretrain.network.topology.file` writes in TOML.

A node's id is its name, an undirected edge a cable. Rates and latencies are texts with units, or numbers in bytes/s and
ps. A node's ``rank`` is the number of the rank on it; where no node has one, all GPUs, or else all hosts, are ranks.
"""

from __future__ import annotations

from typing import Any

from foretrain.errors import ConfigError
from foretrain.network.topology.graph import Topology
from foretrain.network.topology.rows import Row, link_rows, node_rows


def parse(text: str) -> dict[str, Any]:
    """What `foretrain.network.topology.rows.built` takes."""
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


def text(topology: Topology) -> str:
    """``topology`` as GraphML."""
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
