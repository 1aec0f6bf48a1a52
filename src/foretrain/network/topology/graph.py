"""A network as data: nodes, directed links in compressed sparse rows, and which nodes the ranks sit on.

    build = Builder("pair")
    a, b, s = build.node("a", "host"), build.node("b", "host"), build.node("s", "switch")
    build.cable(a, s, rate=1.25e9, latency=500_000)
    build.cable(b, s, rate=1.25e9, latency=500_000)
    pair = build.topology(ranks=[a, b])

A topology never changes; `Topology.changed` and `Topology.straggling` make another one. networkx stands at the edge
(`Topology.graph`, `foretrain.network.topology.file`); inside there are arrays only.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError, unknown
from foretrain.units import Time

if TYPE_CHECKING:
    import networkx as nx

Kind: TypeAlias = Literal["host", "gpu", "nic", "pcie", "root", "memory", "storage", "nvswitch", "switch"]
"""Kind of a node. A *host* is a whole server seen from outside; pcie is a PCIe switch, root a root complex."""

ENDS: tuple[Kind, ...] = ("host", "gpu", "memory", "storage")
"""Kinds that do not forward unless told to."""


@dataclass(frozen=True, slots=True)
class Node:
    """A host, GPU, NIC or switch of a topology.

    Attributes:
        name: unique in its topology.
        kind: what it is.
        server: index of the server it is in, -1 for what stands between servers; a rack that NVLink joins is one.
        tier: its height in a drawing and among switches: 0 for ranks, 1 for what they are plugged into, and so on.
        forwards: whether it passes on what is not for it. GPUs and hosts do not, but in a torus.
        reduces: whether it can sum what passes through it (NVLS, SHARP, SwitchML).
        bundle: switches with the same non-empty bundle are interchangeable: per-packet spraying loads them equally.
        slowdown: how many times longer its computation takes than that of its kind: 1.2 for a 20 % straggler.
        host: number of the machine that it is in among those of its server, of which only such a rack has several.
    """

    name: str
    kind: Kind
    server: int = -1
    tier: int = 0
    forwards: bool = False
    reduces: bool = False
    bundle: str = ""
    slowdown: float = 1.0
    host: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Topology:
    """Nodes and directed links. Links are sorted by source, so that those leaving v are ``first[v]:first[v + 1]``.

    Attributes:
        name: what it is called, e.g. ``"fat_tree(k=4)"``.
        nodes: indexed by node.
        ranks: node of each rank, int32 of shape (ranks,).
        first: int32 of shape (nodes + 1,): compressed sparse rows over ``source``.
        source: node a link leaves, int32 of shape (links,).
        target: node a link enters, int32 of shape (links,).
        rate: bytes/s, float64 of shape (links,).
        latency: ps from the last bit sent to the last bit received, int64 of shape (links,).
        metric: what routing adds up to find the shortest path, int32 of shape (links,), at least 1.
        up: whether a link works, bool of shape (links,).
        background: bytes/s that other traffic takes, float64 of shape (links,).
        faulty_links: whether some links are unlike their kind, so that no rank can stand for another.
    """

    name: str
    nodes: tuple[Node, ...]
    ranks: NDArray[np.int32]
    first: NDArray[np.int32]
    source: NDArray[np.int32]
    target: NDArray[np.int32]
    rate: NDArray[np.float64]
    latency: NDArray[np.int64]
    metric: NDArray[np.int32]
    up: NDArray[np.bool_]
    background: NDArray[np.float64]
    faulty_links: bool = False

    @property
    def links(self) -> int:
        """Return the number of directed links."""
        return len(self.source)

    @property
    def capacity(self) -> NDArray[np.float64]:
        """Return the bytes/s of each link for the job: 0 where it is down, what background traffic leaves elsewhere."""
        return np.where(self.up, self.rate - self.background, 0.0)

    @property
    def slowdown(self) -> float:
        """Return the slowdown of the slowest rank, for which synchronous training waits."""
        return max((self.nodes[node].slowdown for node in self.ranks), default=1.0)

    @property
    def servers(self) -> int:
        """Return the number of servers that hold ranks; a host is a server."""
        return len(self.ranks_of_servers())

    @property
    def symmetric(self) -> bool:
        """Return whether every link has one of equal rate, latency and metric in the other direction."""
        return _one_way(self) is None

    def hold(self, ranks: int) -> Topology:
        """Return this topology; ConfigError where it has fewer places than ``ranks``."""
        if ranks > len(self.ranks):
            have = f"has {len(self.ranks)} rank{'s' if len(self.ranks) > 1 else ''} and cannot hold {ranks}"
            raise ConfigError("topology", self.name, have, "make it larger, or the job smaller")
        return self

    def ranks_of_servers(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks inside each server, in the order of their first rank."""
        found: dict[tuple[str, int], list[int]] = {}
        for rank, index in enumerate(self.ranks.tolist()):
            node = self.nodes[index]
            found.setdefault(("server", node.server) if node.server >= 0 else ("node", index), []).append(rank)
        return tuple(map(tuple, found.values()))

    def counts(self) -> dict[str, int]:
        """Count the nodes of each kind, ranks, and links (each direction counts)."""
        kinds = Counter(node.kind for node in self.nodes)
        ordered = {kind: kinds[kind] for kind in get_args(Kind) if kinds[kind]}
        return ordered | {"ranks": len(self.ranks), "links": self.links}

    def node(self, name: str) -> int:
        """Return the index of the node called ``name``; ConfigError lists near names, and one of each kind of name."""
        for index, node in enumerate(self.nodes):
            if node.name == name:
                return index
        examples = {re.sub("[0-9]+", "", node.name): node.name for node in reversed(self.nodes)}
        raise unknown("node", name, (node.name for node in self.nodes), reversed(examples.values()))

    def between(self, source: str, target: str) -> NDArray[np.int64]:
        """Return the links from one node to another, by name; ConfigError where there are none."""
        a, b = self.node(source), self.node(target)
        found = np.flatnonzero((self.source == a) & (self.target == b))
        if not len(found):
            near = ", ".join(self.nodes[n].name for n in self.target[self.first[a] : self.first[a + 1]])
            raise ConfigError("link", f"{source} -> {target}", "does not exist", f"{source} is linked to: {near}")
        return found

    def link_name(self, link: int) -> str:
        """Return the ends of a link, e.g. ``"host0 -> switch"``."""
        return _link_name(self, link)

    def changed(
        self,
        links: Sequence[int] | NDArray[np.integer],
        *,
        rate: float | None = None,
        latency: Time | None = None,
        up: bool | None = None,
        background: float | None = None,
    ) -> Topology:
        """Return a copy in which ``links`` are degraded, slower, down, up again or shared with other traffic."""
        chosen = np.asarray(links, np.int64)
        if len(chosen) and not (chosen.min() >= 0 and chosen.max() < self.links):
            raise ConfigError("links", list(links), "is not a list of links", f"they are 0 to {self.links - 1}")
        new: dict[str, Any] = {}
        for name, value in (("rate", rate), ("latency", latency), ("up", up), ("background", background)):
            if value is not None:
                column = getattr(self, name).copy()
                column[chosen] = value
                new[name] = column
        return _checked(dataclasses.replace(self, **new))

    def straggling(self, slowdown: Mapping[str, float]) -> Topology:
        """Return a copy in which the named nodes compute that many times longer."""
        places = {self.node(name): factor for name, factor in slowdown.items()}
        nodes = tuple(
            dataclasses.replace(node, slowdown=places.get(index, node.slowdown))
            for index, node in enumerate(self.nodes)
        )
        return _checked(dataclasses.replace(self, nodes=nodes))

    def graph(self) -> nx.MultiDiGraph:
        """Return a networkx graph whose nodes and edges carry the fields of `Node` and the columns of the links."""
        import networkx as nx

        graph = nx.MultiDiGraph(name=self.name)
        for index, node in enumerate(self.nodes):
            graph.add_node(index, **{f.name: getattr(node, f.name) for f in dataclasses.fields(node)})
        for rank, index in enumerate(self.ranks.tolist()):
            graph.nodes[index]["rank"] = rank
        for link in range(self.links):
            columns = ("rate", "latency", "metric", "up", "background")
            values = {name: getattr(self, name)[link].item() for name in columns}
            graph.add_edge(int(self.source[link]), int(self.target[link]), key=link, **values)
        return graph

    def __str__(self) -> str:
        return f"{self.name}: " + ", ".join(f"{count} {kind}" for kind, count in self.counts().items())


@dataclass(slots=True)
class Builder:
    """Builder of a topology from nodes and links."""

    name: str
    nodes: list[Node] = field(default_factory=list)
    _links: list[tuple[int, int, float, Time, int, bool, float]] = field(default_factory=list)

    def node(
        self,
        name: str,
        kind: Kind,
        *,
        server: int = -1,
        tier: int = 0,
        forwards: bool | None = None,
        reduces: bool = False,
        bundle: str = "",
        slowdown: float = 1.0,
        host: int = 0,
    ) -> int:
        """Add a node and return its index. It ``forwards`` unless it is a host, GPU, memory or storage."""
        passes = kind not in ENDS if forwards is None else forwards
        self.nodes.append(Node(name, kind, server, tier, passes, reduces, bundle, slowdown, host))
        return len(self.nodes) - 1

    def link(
        self,
        source: int,
        target: int,
        *,
        rate: float,
        latency: Time,
        metric: int = 1,
        up: bool = True,
        background: float = 0.0,
    ) -> None:
        """Add one directed link."""
        self._links.append((source, target, rate, latency, metric, up, background))

    def cable(self, a: int, b: int, *, rate: float, latency: Time, metric: int = 1) -> None:
        """Add a link in each direction."""
        self.link(a, b, rate=rate, latency=latency, metric=metric)
        self.link(b, a, rate=rate, latency=latency, metric=metric)

    def topology(self, ranks: Sequence[int], *, symmetric: bool = True) -> Topology:
        """Return the topology built so far, after checking it.

        Args:
            ranks: the node of each rank, in rank order.
            symmetric: whether every link must have an equal one in the other direction.

        Raises:
            ConfigError: a name, rate, latency or rank is wrong, a rank cannot reach another, or symmetry is broken.
        """
        order = sorted(range(len(self._links)), key=lambda i: self._links[i][:2])
        columns = list(zip(*(self._links[i] for i in order), strict=True)) or [()] * 7
        source = np.array(columns[0], np.int32)
        first = np.zeros(len(self.nodes) + 1, np.int32)
        np.cumsum(np.bincount(source, minlength=len(self.nodes)), out=first[1:])
        made = Topology(
            name=self.name,
            nodes=tuple(self.nodes),
            ranks=np.array(ranks, np.int32),
            first=first,
            source=source,
            target=np.array(columns[1], np.int32),
            rate=np.array(columns[2], np.float64),
            latency=np.array(columns[3], np.int64),
            metric=np.array(columns[4], np.int32),
            up=np.array(columns[5], np.bool_),
            background=np.array(columns[6], np.float64),
        )
        _checked(made)
        if symmetric:
            _check_symmetric(made)
        return made


def _checked(topology: Topology) -> Topology:
    """Return ``topology``; ConfigError where a node, link or rank is impossible or the ranks are not connected."""
    names = Counter(node.name for node in topology.nodes)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise ConfigError("nodes", twice[0], "is the name of two nodes", "give each its own")
    for node in topology.nodes:
        if node.kind not in get_args(Kind):
            raise unknown(f"nodes.{node.name}.kind", node.kind, get_args(Kind))
        if node.server < -1:
            raise ConfigError(
                f"nodes.{node.name}.server", node.server, "is no server", "write 0 or more, or leave it out"
            )
        if not 1 <= node.slowdown < float("inf"):
            raise ConfigError(
                f"nodes.{node.name}.slowdown", node.slowdown, "is not a factor of at least 1", "write 1.2 for 20 %"
            )
    _check_links(topology)
    ranks = topology.ranks
    if not len(ranks):
        raise ConfigError("ranks", [], "is empty", "name the nodes that ranks sit on")
    if ranks.min() < 0 or ranks.max() >= len(topology.nodes) or len(np.unique(ranks)) < len(ranks):
        raise ConfigError("ranks", ranks.tolist()[:8], "are not different nodes", f"of 0 to {len(topology.nodes) - 1}")
    _check_connected(topology)
    return topology


def _check_links(topology: Topology) -> None:
    count = len(topology.nodes)
    checks = (
        ("source", (topology.source < 0) | (topology.source >= count), "is no node", f"nodes are 0 to {count - 1}"),
        ("target", (topology.target < 0) | (topology.target >= count), "is no node", f"nodes are 0 to {count - 1}"),
        ("target", topology.source == topology.target, "is where the link comes from", "link different nodes"),
        ("rate", ~(np.isfinite(topology.rate) & (topology.rate > 0)), "is not a positive rate", "write e.g. '100Gbps'"),
        ("latency", topology.latency < 0, "is negative", "write e.g. '500ns'"),
        ("metric", topology.metric < 1, "is below 1", "write 1 for an ordinary link"),
        (
            "background",
            ~((topology.background >= 0) & (topology.background < topology.rate)),
            "is not between 0 and the link's rate",
            "leave some of the link, or set it down",
        ),
    )
    for name, wrong, problem, remedy in checks:
        if wrong.any():
            link = int(np.flatnonzero(wrong)[0])
            raise ConfigError(
                f"links[{_link_name(topology, link)}].{name}", getattr(topology, name)[link].item(), problem, remedy
            )


def _link_name(topology: Topology, link: int) -> str:
    """Return a link's ends, since links are not numbered as their author did."""
    ends = (int(topology.source[link]), int(topology.target[link]))
    known = range(len(topology.nodes))
    return " -> ".join(topology.nodes[end].name if end in known else str(end) for end in ends)


def _check_connected(topology: Topology) -> None:
    """Raise ConfigError where a rank does not reach another over links that are up and nodes that forward."""
    first, target, up = topology.first.tolist(), topology.target.tolist(), topology.up.tolist()
    for backwards in (False, True):
        if backwards:
            order = np.argsort(topology.target, kind="stable")
            counts = np.bincount(topology.target, minlength=len(topology.nodes))
            first = [0, *np.cumsum(counts).tolist()]
            target, up = topology.source[order].tolist(), topology.up[order].tolist()
        start = int(topology.ranks[0])
        seen, stack = {start}, [start]
        while stack:
            node = stack.pop()
            if node != start and not topology.nodes[node].forwards:
                continue
            for link in range(first[node], first[node + 1]):
                if up[link] and target[link] not in seen:
                    seen.add(target[link])
                    stack.append(target[link])
        for rank, node in enumerate(topology.ranks.tolist()):
            if node not in seen:
                pair = (rank, 0) if backwards else (0, rank)
                raise ConfigError(
                    "topology",
                    topology.name,
                    f"has no way from rank {pair[0]} ({topology.nodes[topology.ranks[pair[0]]].name}) to rank {pair[1]}"
                    f" ({topology.nodes[topology.ranks[pair[1]]].name})",
                    "add a link, or set one up again",
                )


def _one_way(topology: Topology) -> tuple[int, int] | None:
    """Return two nodes that have not as many equal links in one direction as in the other."""
    columns = (topology.rate, topology.latency, topology.metric)
    keys = zip(topology.source.tolist(), topology.target.tolist(), *(c.tolist() for c in columns), strict=True)
    there = Counter(keys)
    return next(((a, b) for (a, b, *rest), count in there.items() if there[b, a, *rest] != count), None)


def _check_symmetric(topology: Topology) -> None:
    if pair := _one_way(topology):
        a, b = (topology.nodes[node].name for node in pair)
        raise ConfigError(
            "links", f"{a} -> {b}", "has no equal link in the other direction", "add it, or say symmetric = false"
        )
