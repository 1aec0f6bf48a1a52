"""Topologies in files: TOML, either a fabric and what is changed in it or every node and link, and GraphML.

    kind = "fat_tree"                       # a fabric of `foretrain.network.topology.notation`, with its parameters
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
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretrain.errors import ConfigError, unknown
from foretrain.files import write_atomically
from foretrain.network.topology import graphml
from foretrain.network.topology.graph import Topology
from foretrain.network.topology.notation import build
from foretrain.network.topology.rows import CHANGE, Row, built, ends, link_rows, link_values, node_rows, typed

_BOTH = ("changes", "stragglers")
_EXPLICIT = ("name", "symmetric", "nodes", "links", "ranks")


def load(path: str | os.PathLike[str]) -> Topology:
    """The topology in a ``.toml`` or ``.graphml`` file.

    Raises:
        ConfigError: names the file, the key, what stood there and what to write.
    """
    text = _read(path)
    try:
        if Path(path).suffix == ".graphml":
            return built(**graphml.parse(text))
        return _topology(_toml(text))
    except ConfigError as error:
        raise ConfigError(f"{os.fspath(path)}: {error.field}", error.value, error.problem, error.remedy) from error


def save(topology: Topology, path: str | os.PathLike[str]) -> None:
    """Writes ``topology`` to ``path``, as its ending says, whole or not at all."""
    check_format(path)
    write_atomically(path, graphml.text(topology) if Path(path).suffix == ".graphml" else _text(topology))


def check_format(path: str | os.PathLike[str]) -> None:
    """ConfigError where ``path`` does not end as a format does."""
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
