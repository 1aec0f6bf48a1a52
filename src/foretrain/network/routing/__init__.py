"""Routing of flows: a file for each kind of policy, and new paths when links fail.

    route = router(topology, "ecmp", seed=1)
    paths = route.paths(sources, targets, connections)

Every policy takes shortest ways only (the sum of `Topology.metric`), over links that are up and through nodes that
forward; only a table may say otherwise.

`Static` routes by listed paths, and by another policy everything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError, unknown
from foretrain.network.program import Paths
from foretrain.network.routing.per_flow import Adaptive, Ecmp, Shortest, link_load
from foretrain.network.routing.route_search import PortableRouter, reroute
from foretrain.network.routing.spray import Scatter, Spray, bundled, contract, groups
from foretrain.network.topology.graph import Topology

Key: TypeAlias = tuple[str, str] | tuple[str, str, int]
"""Source and destination by name, and, for one connection only, its number."""
Given: TypeAlias = Sequence[str] | Sequence[int]
"""A path: the names of its nodes, both ends included, or its links."""


class Static:
    """Routing by a table of paths; the path of a connection goes before that of its pair.

    A listed path need not be a shortest one. Between two nodes with parallel links a path by names takes the first that
    is up; one by links says which.

    Attributes:
        topology: the network.
        fallback: routes what is not in the table; None refuses it.
    """

    def __init__(
        self, topology: Topology, table: Mapping[Key, Given], *, fallback: PortableRouter | None = None
    ) -> None:
        self.topology, self.fallback = topology, fallback
        if fallback is not None and fallback.topology is not topology:
            remedy = "make the fallback of the same topology (spray, which bundles links, has another one)"
            raise ConfigError("fallback", fallback.topology.name, "is not the topology of the table", remedy)
        index = {node.name: i for i, node in enumerate(topology.nodes)}
        self._rows: dict[tuple[int, ...], int] = {}
        self._links: list[list[int]] = []
        for key, given in table.items():
            try:
                links = _by_names(topology, index, given) if _are_names(given) else [int(link) for link in given]
                ends = _ends(topology, key)
                _check(topology, ends, links)
            except ConfigError as error:
                raise error.at(f"table[{', '.join(map(str, key))}]") from None
            self._rows[(*ends, *key[2:])] = len(self._links)  # pyright: ignore[reportArgumentType]
            self._links.append(links)

    def on(self, topology: Topology, staying: Paths | None = None) -> Static:
        """Return this table on another topology with the same links, without the paths that are down there."""
        other = Static(topology, {}, fallback=self.fallback and self.fallback.on(topology, staying))
        other._links = self._links
        other._rows = {key: row for key, row in self._rows.items() if topology.up[self._links[row]].all()}
        return other

    def paths(self, sources: NDArray[np.int32], targets: NDArray[np.int32], connections: NDArray[np.int32]) -> Paths:
        """Return the path of each flow; ConfigError where it is not listed and there is no fallback, or no way."""
        flows = zip(sources.tolist(), targets.tolist(), connections.tolist(), strict=True)
        rows = np.array([self._rows.get(f, self._rows.get(f[:2], -1)) for f in flows], np.int64)
        rest = np.flatnonzero(rows < 0)
        if len(rest) and self.fallback is None:
            source, target = (self.topology.nodes[ends[rest[0]]].name for ends in (sources, targets))
            raise ConfigError("table", f"{source} -> {target}", "is not listed", "list it, or give a fallback")
        first = np.cumsum([0, *map(len, self._links)])
        links = np.concatenate([np.zeros(0, np.int32), *(np.array(path, np.int32) for path in self._links)])
        if self.fallback is not None and len(rest):
            others = self.fallback.paths(sources[rest], targets[rest], connections[rest])
            rows[rest] = np.arange(len(rest)) + len(self._links)
            first = np.concatenate([first, others.first[1:] + first[-1]])
            links = np.concatenate([links, others.links])
        return Paths(first.astype(np.int32), links).gather(rows)


def _are_names(given: Given) -> bool:
    return any(isinstance(step, str) for step in given)


def _ends(topology: Topology, key: Key) -> tuple[int, int]:
    if len(key) not in (2, 3) or (len(key) == 3 and not isinstance(key[2], int)):
        raise ConfigError("", key, "is not a pair of names", "write (source, target) or (source, target, connection)")
    return topology.node(key[0]), topology.node(key[1])


def _by_names(topology: Topology, index: Mapping[str, int], given: Given) -> list[int]:
    links = []
    for a, b in pairwise(given):
        found = topology.between(str(a), str(b))
        links.append(int(next((link for link in found if topology.up[link]), found[0])))
    return links


def _check(topology: Topology, ends: tuple[int, int], links: list[int]) -> None:
    """Raise ConfigError where ``links`` do not lead from one end to the other."""
    source, target = ends
    if source == target and not links:
        return
    if not links or not all(0 <= link < topology.links for link in links):
        raise ConfigError("", links, "is not a path", f"name its nodes, or its links of 0 to {topology.links - 1}")
    at = source
    for step, link in enumerate(links):
        a, b = int(topology.source[link]), int(topology.target[link])
        name = f"{topology.nodes[a].name} -> {topology.nodes[b].name}"
        if a != at:
            raise ConfigError(f"[{step}]", name, f"does not go on from {topology.nodes[at].name}", "join the links")
        if a != source and not topology.nodes[a].forwards:
            raise ConfigError(f"[{step}]", name, f"leaves {topology.nodes[a].name}, which forwards nothing", "avoid it")
        if not topology.up[link]:
            raise ConfigError(f"[{step}]", name, "is down", "set it up, or take another way")
        at = b
    if at != target:
        end, wanted = topology.nodes[at].name, topology.nodes[target].name
        raise ConfigError("", end, f"is where the path ends, not {wanted}", f"let it end at {wanted}")


__all__ = [
    "Adaptive",
    "Ecmp",
    "Name",
    "PortableRouter",
    "Scatter",
    "Shortest",
    "Spray",
    "Static",
    "bundled",
    "contract",
    "groups",
    "link_load",
    "reroute",
    "router",
]

Name: TypeAlias = Literal["shortest", "ecmp", "static", "spray", "adaptive"]
"""Names of routers that `router` makes."""


def router(
    topology: Topology,
    policy: Name | str = "ecmp",
    *,
    seed: int = 0,
    polarised: bool = False,
    table: Mapping[Key, Given] | None = None,
    fallback: Name | str | None = "ecmp",
    load: NDArray[np.float64] | None = None,
) -> PortableRouter:
    """Return the policy of that name for ``topology``.

    Args:
        topology: the network.
        policy: ``"shortest"``, ``"ecmp"``, ``"static"``, ``"spray"`` or ``"adaptive"``.
        seed: of the hash of ecmp and spray; the others are not random.
        polarised: ecmp only; see `Ecmp`.
        table: static only, and needed there; see `Static`.
        fallback: static only: the policy of pairs that are not in the table, or None to refuse them.
        load: adaptive only; see `Adaptive`.

    Raises:
        ConfigError: the policy is unknown (near names are listed), or an option is not one of its own.
    """
    for owner, name, given in (
        ("ecmp", "polarised", polarised),
        ("static", "table", table is not None),
        ("adaptive", "load", load is not None),
    ):
        if given and policy != owner and not (policy == "static" and fallback == owner):
            raise ConfigError(name, policy, f"does not have this option, which is one of {owner}", f"use '{owner}'")
    match policy:
        case "shortest":
            return Shortest(topology)
        case "ecmp":
            return Ecmp(topology, seed=seed, polarised=polarised)
        case "spray":
            return Spray(topology, seed=seed)
        case "adaptive":
            return Adaptive(topology, load=load)
        case "static":
            if table is None:
                raise ConfigError("table", None, "lists no paths", "write table={('a', 'b'): ['a', 'switch', 'b']}")
            if fallback == "static":
                raise ConfigError("fallback", fallback, "is the policy itself", "use e.g. 'ecmp'")
            other = fallback and router(topology, fallback, seed=seed, polarised=polarised, load=load)
            return Static(topology, table, fallback=other or None)
    raise unknown("routing", policy, get_args(Name))
