"""Search of shortest routes over arrays that the kernels take, and new routes when links fail."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError
from foretrain.network.program import Paths, Router
from foretrain.network.topology.graph import Topology


@dataclass(frozen=True, slots=True, eq=False)
class Ways:
    """Graph that is searched, and where each search begins.

    Attributes:
        topology: what it was made of.
        first: int32 (nodes + 1,): compressed sparse rows over ``links``.
        links: int32 (links, 3): source, target and metric, which is 0 where a link is down.
        first_into: int32 (nodes + 1,): compressed sparse rows over ``into``.
        into: int32 (links that are up,): links by the node they enter.
        forwards: bool (nodes,).
        anchor: int32 (nodes,): searching the ways to this node is enough to know those to a node. A destination that
            hangs at a single switch shares the search with all others there.
        unit: whether each metric is 1, so that a breadth-first search finds the shortest ways.
        ball: size of the balls around sources; see Note [From both ends] in `foretrain.network.routing.kernels`.
        pairs: up to how many flows with the same anchor are searched for from both ends, one by one.
    """

    topology: Topology
    first: NDArray[np.int32]
    links: NDArray[np.int32]
    first_into: NDArray[np.int32]
    into: NDArray[np.int32]
    forwards: NDArray[np.bool_]
    anchor: NDArray[np.int32]
    unit: bool
    ball: int
    pairs: int

    @classmethod
    def of(cls, topology: Topology) -> Ways:
        """Return the graph of ``topology``, over links that are up."""
        nodes, up = len(topology.nodes), np.flatnonzero(topology.up)
        source, target = topology.source[up], topology.target[up]
        forwards = np.array([node.forwards for node in topology.nodes], np.bool_)
        lowest, highest = np.full(nodes, nodes), np.full(nodes, -1)
        np.minimum.at(lowest, target, source)
        np.maximum.at(highest, target, source)
        # A single neighbour that does not forward could not be passed through, so that its search would say too much.
        single = (lowest == highest) & forwards[np.maximum(highest, 0)]
        # Measured on servers of eight GPUs: any size that holds a server, its leaf and some spines will do.
        ball = 16 + math.isqrt(nodes) // 4
        columns = (topology.source, topology.target, np.where(topology.up, topology.metric, 0))
        return cls(
            topology=topology,
            first=np.ascontiguousarray(topology.first, np.int32),
            links=np.ascontiguousarray(np.stack(columns, axis=1), np.int32),
            first_into=np.concatenate([[0], np.cumsum(np.bincount(target, minlength=nodes))]).astype(np.int32),
            into=up[np.argsort(target, kind="stable")].astype(np.int32),
            forwards=forwards,
            anchor=np.where(single, lowest, np.arange(nodes)).astype(np.int32),
            unit=bool((topology.metric[up] == 1).all()),
            ball=ball,
            pairs=int(forwards.sum()) // (8 * ball),
        )

    def by_hop(
        self,
        sources: NDArray[np.integer],
        targets: NDArray[np.integer],
        connections: NDArray[np.integer],
        *,
        spread: bool,
        polarised: bool = False,
        seed: int = 0,
    ) -> Found:
        """Find paths on which each node chooses a link of the shortest paths: the first, or by hash to ``spread``."""
        from foretrain.network.routing.kernels import hop_by_hop

        order, flows = self._flows(sources, targets, connections)
        lengths, hops, ties = hop_by_hop(flows, *self._graph(), spread, polarised, seed)
        return self._found(order, lengths, hops, int(ties))

    def by_load(
        self,
        sources: NDArray[np.integer],
        targets: NDArray[np.integer],
        sizes: NDArray[np.float64],
        load: NDArray[np.float64],
    ) -> Found:
        """Find paths one after the other where ``load``, to which they are added, is least in relation to capacity."""
        from foretrain.network.routing.kernels import least_loaded

        order, flows = self._flows(sources, targets, np.zeros(len(sources), np.int32))
        capacity = np.ascontiguousarray(self.topology.capacity)
        sizes = np.ascontiguousarray(sizes[order], np.float64)
        lengths, hops, ties = least_loaded(flows, *self._graph(), sizes, capacity, load)
        return self._found(order, lengths, hops, int(ties))

    def _graph(self) -> tuple[NDArray, NDArray, NDArray, NDArray, NDArray, bool, int, int]:
        searched = self.first, self.links, self.first_into, self.into, self.forwards, self.unit
        return *searched, self.ball, self.pairs

    def _flows(self, *columns: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the order in which flows are routed, those of an anchor in succession, and their columns for the
        kernels."""
        counts = tuple(map(len, columns))
        if len(set(counts)) > 1:
            raise ConfigError("sources, targets, connections", counts, "are not equally many", "give one per flow")
        for name, column in zip(("sources", "targets"), columns, strict=False):
            wrong = np.flatnonzero((column < 0) | (column >= len(self.anchor)))
            if len(wrong):
                nodes = f"nodes of {self.topology.name} are 0 to {len(self.anchor) - 1}"
                raise ConfigError(f"{name}[{wrong[0]}]", int(column[wrong[0]]), "is no node", nodes)
        anchors = self.anchor[columns[1]]
        order = np.argsort(anchors, kind="stable")
        flows = np.stack([*(column[order] for column in columns), anchors[order]], axis=1)
        return order, np.ascontiguousarray(flows, np.int32)

    def _found(self, order: NDArray[np.int64], lengths: NDArray[np.int32], hops: NDArray[np.int32], ties: int) -> Found:
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        first = np.concatenate([[0], np.cumsum(np.maximum(lengths, 0))]).astype(np.int32)
        return Found(Paths(first, hops).gather(back), np.sort(order[lengths < 0]), ties)


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """Paths, the flows that have none (theirs are empty), and how many flows had a choice between several."""

    paths: Paths
    lost: NDArray[np.int64]
    ties: int

    def all(self, topology: Topology, sources: NDArray[np.integer], targets: NDArray[np.integer]) -> Paths:
        """Return the paths; ConfigError where a flow has none."""
        if len(self.lost):
            raise ConfigError(
                "paths",
                pair(topology, int(sources[self.lost[0]]), int(targets[self.lost[0]])),
                f"has no way over links that are up and nodes that forward{others(self.lost, sources, targets)}",
                "add a link, or set one up again",
            )
        return self.paths


def pair(topology: Topology, source: int, target: int) -> str:
    """Return the names of a flow's ends as ``a -> b``."""
    return f"{topology.nodes[source].name} -> {topology.nodes[target].name}"


def others(flows: NDArray[np.integer], sources: NDArray[np.integer], targets: NDArray[np.integer]) -> str:
    """Return a text that counts the pairs of ``flows`` after the first; empty for none."""
    pairs = len({*zip(sources[flows].tolist(), targets[flows].tolist(), strict=True)})
    return f" (nor have {pairs - 1} other pairs)" if pairs > 1 else ""


class PortableRouter(Router, Protocol):
    """A router that can be moved to another topology."""

    def on(self, topology: Topology, staying: Paths | None = None) -> PortableRouter:
        """Return this policy on ``topology``, where flows on the paths ``staying`` remain."""
        ...


def reroute(
    router: PortableRouter,
    paths: Paths,
    sources: NDArray[np.int32],
    targets: NDArray[np.int32],
    connections: NDArray[np.int32],
    changed: Topology,
) -> tuple[NDArray[np.int32], Paths]:
    """Find new paths for the flows whose path has a link that is down; all others stay where they are.

    A link that comes up again attracts nobody: ask ``router.on(changed)`` for the paths of new flows.

    Args:
        router: what chose ``paths``.
        paths: of the flows under way.
        sources, targets, connections: of the same flows, int32 (flows,).
        changed: the topology after the change (for spray the one that it was made of); links keep their numbers.

    Returns:
        The flows concerned, int32, ascending, and a path for each.

    Raises:
        ConfigError: a flow has no way left (named, with the link that failed), or ``changed`` has other links.
    """
    for name, column in (("sources", sources), ("targets", targets), ("connections", connections)):
        if len(column) != len(paths):
            raise ConfigError(name, len(column), "are not one per path", f"give {len(paths)}")
    after = router.on(changed).topology
    before = router.topology
    if not (np.array_equal(before.source, after.source) and np.array_equal(before.target, after.target)):
        raise ConfigError("changed", changed.name, "has other links", "make it with Topology.changed")
    crossed = np.repeat(np.arange(len(paths), dtype=np.int32), np.diff(paths.first))
    flows = np.unique(crossed[~after.up[paths.links]])
    kept = np.setdiff1d(np.arange(len(paths)), flows)
    lost = Ways.of(after).by_hop(sources[flows], targets[flows], connections[flows], spread=False).lost
    if len(lost):
        flow = int(flows[lost[0]])
        links = paths.of(flow)
        failed = ", ".join(
            pair(after, int(after.source[link]), int(after.target[link])) for link in links[~after.up[links]]
        )
        raise ConfigError(
            "paths",
            pair(after, int(sources[flow]), int(targets[flow])),
            f"went over {failed}, which is down, and has no way left{others(flows[lost], sources, targets)}",
            "set a link up again, or end the flow",
        )
    chosen = router.on(changed, paths.gather(kept))
    return flows, chosen.paths(sources[flows], targets[flows], connections[flows])
