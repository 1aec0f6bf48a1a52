"""Per-packet spraying.

Spray     for rates: interchangeable switches and parallel links are bundled into one
Scatter   for packets: those of a flow take its ways in turn
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError
from foretrain.network.program import Paths
from foretrain.network.routing.per_flow import checked_seed
from foretrain.network.routing.route_search import Ways
from foretrain.network.topology.graph import Node, Topology

_MOST: Final = 64
"""Ways of a flow: as many as a sender remembers congestion of."""
_DRAWS: Final = 16
"""Ways that are drawn at a time."""


def bundled(topology: Topology) -> Topology:
    """Return ``topology`` with interchangeable switches, then parallel links, joined; see `groups` and `contract`."""
    return contract(topology, groups(topology))


def groups(topology: Topology) -> NDArray[np.int32]:
    """Return the group of each node, int32 (nodes,): interchangeable nodes, groups in the order of their first nodes.

    Where a node has a `Node.bundle`, the bundles are the groups. Otherwise they are found by colour refinement:
    switches fall apart until those of one colour have, for every colour, equally many links of equal rate, latency and
    metric to and from it. Everything but switches has a colour of its own, and so have ranks and switches linked to
    their like. Whatever the fabric carries with fractions of flows can then be carried with equal shares in a colour
    (Grohe et al., "Dimension Reduction via Colour Refinement", ESA'14), so that nothing is lost by putting a colour
    together. Whether links are up and what else they carry is left out of account: it may change during a run.
    """
    names = [node.bundle for node in topology.nodes]
    if any(names):
        own = [bundle or f"\0{index}" for index, bundle in enumerate(names)]
        return _numbered(np.unique(own, return_inverse=True)[1])
    ranks = set(topology.ranks.tolist())
    alone = np.array(
        [i in ranks or not n.forwards or n.kind not in ("switch", "nvswitch") for i, n in enumerate(topology.nodes)]
    )
    while True:
        colour = _refined(topology, alone)
        within = (colour[topology.source] == colour[topology.target]) & ~alone[topology.source]
        if not within.any():
            return _numbered(colour)
        alone[topology.source[within]] = True


def contract(topology: Topology, group: NDArray[np.int32]) -> Topology:
    """Join each group to one node, and all links between two groups to one, its rate and background their sum.

    Of parallel links those that are up and of the least metric count; the latency is their greatest. Where all are
    down the one link is down, so that links have the same numbers whatever fails. Links within a group are left out.

    Raises:
        ConfigError: a rank is in a group with other nodes, or two nodes would have the same name.
    """
    sizes = np.bincount(group)
    shared = topology.ranks[sizes[group[topology.ranks]] > 1]
    if len(shared):
        name = topology.nodes[shared[0]].name
        raise ConfigError(f"nodes.{name}.bundle", topology.nodes[shared[0]].bundle, "bundles a rank", "bundle switches")
    members: list[list[Node]] = [[] for _ in sizes]
    for node, index in zip(topology.nodes, group.tolist(), strict=True):
        members[index].append(node)
    between = np.flatnonzero(group[topology.source] != group[topology.target])
    keys = group[topology.source[between]].astype(np.int64) * len(sizes) + group[topology.target[between]]
    pairs, which = np.unique(keys, return_inverse=True)
    up, metric = topology.up[between], topology.metric[between]
    alive = np.bincount(which, up, len(pairs)) > 0
    counts = up | ~alive[which]
    least = np.full(len(pairs), np.iinfo(np.int32).max)
    np.minimum.at(least, which[counts], metric[counts])
    counts &= metric == least[which]
    latency = np.zeros(len(pairs), np.int64)
    np.maximum.at(latency, which[counts], topology.latency[between][counts])
    source = (pairs // len(sizes)).astype(np.int32)
    made = Topology(
        name=f"{topology.name}, sprayed",
        nodes=tuple(map(_merged, members)),
        ranks=group[topology.ranks],
        first=np.searchsorted(source, np.arange(len(sizes) + 1)).astype(np.int32),
        source=source,
        target=(pairs % len(sizes)).astype(np.int32),
        rate=np.bincount(which[counts], topology.rate[between][counts], len(pairs)).astype(np.float64),
        latency=latency,
        metric=least.astype(np.int32),
        up=alive,
        background=np.bincount(which[counts], topology.background[between][counts], len(pairs)).astype(np.float64),
    )
    return made.changed([])  # a change of nothing, which checks it


def _refined(topology: Topology, alone: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the coarsest colouring that `groups` describes, given the nodes that are to have colours of their own."""
    attributes = np.stack([topology.rate, topology.latency, topology.metric], axis=1)
    kinds = np.unique(attributes, axis=0, return_inverse=True)[1].reshape(-1)
    node = np.concatenate([topology.source, topology.target])
    other = np.concatenate([topology.target, topology.source])
    # Out and in, and of which kind: what does not change from round to round.
    sort = np.concatenate([2 * kinds, 2 * kinds + 1])
    mine = ~alone[node]
    node, other, sort = node[mine], other[mine], sort[mine]
    looks = {(n.kind, n.reduces, n.tier, n.server) for n in topology.nodes}
    look = {key: index for index, key in enumerate(sorted(looks))}
    count = len(topology.nodes)
    shared = [count + look[n.kind, n.reduces, n.tier, n.server] for n in topology.nodes]
    colour = np.unique(np.where(alone, np.arange(count), shared), return_inverse=True)[1]
    while True:
        order = np.lexsort((sort, colour[other], node))
        seen = np.stack([colour[other], sort], axis=1)[order]
        cut = np.searchsorted(node[order], np.arange(count + 1))
        keys: dict[tuple[int, bytes], int] = {}
        new = np.array(
            [keys.setdefault((int(colour[v]), seen[cut[v] : cut[v + 1]].tobytes()), len(keys)) for v in range(count)]
        )
        if len(keys) == colour.max() + 1:
            return new
        colour = new


def _numbered(group: NDArray[np.integer]) -> NDArray[np.int32]:
    """Return the groups renumbered in the order of their first members."""
    first = np.unique(group, return_index=True)[1]
    number = np.empty(len(first), np.int32)
    number[np.argsort(first)] = np.arange(len(first))
    return number[group]


def _merged(members: list[Node]) -> Node:
    """Return one node that stands for ``members``."""
    if len(members) == 1:
        return members[0]
    first = members[0]
    return dataclasses.replace(
        first,
        name=first.bundle or f"{first.name} and {len(members) - 1} like it",
        server=first.server if len(Counter(node.server for node in members)) == 1 else -1,
        forwards=all(node.forwards for node in members),
        reduces=all(node.reduces for node in members),
        slowdown=max(node.slowdown for node in members),
    )


class Spray:
    """Per-packet spraying as a fluid: a flow sees switches and links that are alike as one.

    Exact for rates where the bundled switches are interchangeable, that is, each has the same links to the same places:
    an even spread is then the best and the fairest there is. An idealisation in that packets spread perfectly (no
    queues from bad luck), arrive in any order at no cost, and, after failures, in that the capacities that remain of a
    bundle are used fully in each direction, though a switch that lost one link can no longer use its others for all.

    Where equal ways are left that cannot be bundled (through several NICs of a server, say), a connection keeps to one
    of them by ECMP's hash: a sender sprays in the fabric, not over its NICs.

    Attributes:
        fabric: the network that it was made of.
        topology: `foretrain.network.routing.contract` of it; paths name its links.
        group: for each node of the fabric, which node of ``topology`` it is in, int32.
        seed: of the hash.
    """

    def __init__(self, fabric: Topology, *, seed: int = 0, group: NDArray[np.int32] | None = None) -> None:
        self.fabric, self.seed = fabric, checked_seed(seed)
        self.group = groups(fabric) if group is None else group
        self.topology = contract(fabric, self.group)

    @cached_property
    def _ways(self) -> Ways:
        return Ways.of(self.topology)

    def on(self, topology: Topology, staying: Paths | None = None) -> Spray:
        """Return this policy with the same bundles on another topology with the same links as ``fabric``."""
        if len(topology.nodes) != len(self.fabric.nodes):
            raise ConfigError("topology", topology.name, "is not the one that is sprayed over", "change the fabric")
        return Spray(topology, seed=self.seed, group=self.group)

    def paths(self, sources: NDArray[np.int32], targets: NDArray[np.int32], connections: NDArray[np.int32]) -> Paths:
        """Return the bundled path of each flow between nodes of ``topology``.

        Raises:
            ConfigError: a flow has no way, or nothing is bundled in spite of several equal ways.
        """
        found = self._ways.by_hop(sources, targets, connections, spread=True, seed=self.seed)
        if found.ties and self.topology.links == self.fabric.links:
            raise ConfigError(
                "routing",
                "spray",
                f"finds nothing to bundle in {self.fabric.name}, though {found.ties} flows have several equal ways",
                "give interchangeable switches the same bundle, or use 'adaptive' or 'ecmp'",
            )
        return found.all(self.topology, sources, targets)


class Scatter:
    """Per-packet spraying: packets of a flow take its shortest paths in turn; queues, bad luck and reordering are real.

    Ways are drawn as ECMP draws them, by hashes, until as many again bring no new one. A flow has at most 64; its first
    is that of `Ecmp` with this seed. What answers it takes the first way back.

    Attributes:
        topology: the network.
        seed: of the hash.
    """

    def __init__(self, topology: Topology, *, seed: int = 0) -> None:
        self.topology, self.seed = topology, checked_seed(seed)

    @cached_property
    def _ways(self) -> Ways:
        return Ways.of(self.topology)

    def on(self, topology: Topology, staying: Paths | None = None) -> Scatter:
        """Return this policy on another topology."""
        return Scatter(topology, seed=self.seed)

    def paths(self, sources: NDArray[np.int32], targets: NDArray[np.int32], connections: NDArray[np.int32]) -> Paths:
        """Return the first path of each flow; ConfigError where there is none."""
        found = self._ways.by_hop(sources, targets, connections, spread=True, seed=self.seed)
        return found.all(self.topology, sources, targets)

    def others(
        self, sources: NDArray[np.int32], targets: NDArray[np.int32], connections: NDArray[np.int32]
    ) -> tuple[Paths, ...]:
        """Return the second path of each flow, its third and so on; flows that have fewer begin anew."""
        drawn = [self.paths(sources, targets, connections)]
        keys = [_keys(drawn[0])]
        while True:
            had = _most_distinct(keys)
            for _ in range(_DRAWS if len(drawn) == 1 else len(drawn)):
                # Any connections but those that there are: 2^20 labels are hashed.
                more = (connections + len(drawn) * 0x3C6F) & 0xFFFFF
                drawn.append(self.paths(sources, targets, more.astype(np.int32)))
                keys.append(_keys(drawn[-1]))
            if _most_distinct(keys) == had or len(drawn) > 8 * _MOST:
                return _distinct(drawn, np.stack(keys))


def _keys(paths: Paths) -> NDArray[np.uint64]:
    """Return a number of each path, uint64 (flows,), that tells paths apart."""
    mixed = (paths.links.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    total = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed * np.uint64(0xBF58476D1CE4E5B9), dtype=np.uint64)])
    return total[paths.first[1:]] - total[paths.first[:-1]]


def _most_distinct(keys: list[NDArray[np.uint64]]) -> int:
    """Return the number of different paths drawn, of all flows together."""
    ordered = np.sort(np.stack(keys), axis=0)
    return int((ordered[1:] != ordered[:-1]).sum())


def _distinct(drawn: list[Paths], keys: NDArray[np.uint64]) -> tuple[Paths, ...]:
    """Return all paths but the first of each flow, once each, in the order in which they were drawn."""
    order = np.argsort(keys, axis=0, kind="stable")
    ordered = np.take_along_axis(keys, order, axis=0)
    fresh = np.ones(keys.shape, np.bool_)
    np.put_along_axis(fresh, order[1:], ordered[1:] != ordered[:-1], axis=0)
    count = np.minimum(fresh.sum(axis=0), _MOST)
    # Draws of each flow, those that are new first.
    turns = np.argsort(~fresh, axis=0, kind="stable")
    flows = np.arange(keys.shape[1])
    everything = Paths.stacked(drawn)
    return tuple(
        everything.gather(turns[way % count, flows] * len(flows) + flows) for way in range(1, int(count.max(initial=1)))
    )
