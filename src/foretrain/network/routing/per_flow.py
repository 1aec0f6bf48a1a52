"""Routing of whole flows over shortest ways: always the same, by a hash (ECMP), or where the least is under way."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError
from foretrain.network.program import Paths
from foretrain.network.routing.route_search import Ways
from foretrain.network.topology.graph import Topology


class Shortest:
    """Shortest-path routing: every node sends what is for a destination over the same link, as a forwarding table says.

    Among equal ways a node takes its link of the lowest index, that is, to the neighbour of the lowest index, and of
    parallel links the one that was built first. All nodes prefer the same neighbour then, and one spine of many carries
    everything: what a fabric does whose forwarding tables nobody balanced, and the least to compare with.

    Attributes:
        topology: the network.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    @cached_property
    def _ways(self) -> Ways:
        return Ways.of(self.topology)

    def on(self, topology: Topology, staying: Paths | None = None) -> Shortest:
        """Return this policy on another topology."""
        return Shortest(topology)

    def paths(self, sources: NDArray[np.int32], targets: NDArray[np.int32], connections: NDArray[np.int32]) -> Paths:
        """Return the shortest path of each pair, whatever the connection; ConfigError where there is none."""
        found = self._ways.by_hop(sources, targets, connections, spread=False)
        return found.all(self.topology, sources, targets)


class Ecmp:
    """Every node chooses among all its links on shortest ways by a hash of the flow's 5-tuple (RFC 2991, modulo-N).

    The 5-tuple is that of RoCEv2: addresses are node indices, the protocol is 17 (UDP), the destination port 4791, and
    the source port 0xC000 to 0xFFFF from the connection's number, folded like a flow label into 14 bits. So flows of
    one connection stay together, and flows of different ones may collide, which is what makes ECMP lose.

    Hardware hashes with CRCs of its own; ours (`foretrain.network.routing.kernels`) is another good hash, so a single
    pattern of collisions is not that of a given switch, but the statistics over seeds are those of a perfect one.

    Attributes:
        topology: the network.
        seed: 0 to 2**32 - 1; another one is another outcome.
        polarised: whether all switches have the same hash, as they leave the factory. Switches of the next tier then
            repeat the choice of the last one and leave most of their links unused. Otherwise each has a salt.
    """

    def __init__(self, topology: Topology, *, seed: int = 0, polarised: bool = False) -> None:
        self.topology, self.seed, self.polarised = topology, checked_seed(seed), polarised

    @cached_property
    def _ways(self) -> Ways:
        return Ways.of(self.topology)

    def on(self, topology: Topology, staying: Paths | None = None) -> Ecmp:
        """Return this policy on another topology, with the same hash. Where nothing changed, nothing is rerouted."""
        return Ecmp(topology, seed=self.seed, polarised=self.polarised)

    def paths(self, sources: NDArray[np.int32], targets: NDArray[np.int32], connections: NDArray[np.int32]) -> Paths:
        """Return a shortest path of each flow; ConfigError where there is none."""
        found = self._ways.by_hop(sources, targets, connections, spread=True, polarised=self.polarised, seed=self.seed)
        return found.all(self.topology, sources, targets)


class Adaptive:
    """Adaptive routing: each connection gets the shortest path whose most loaded link is the least loaded, then the
    least sum.

    A model of adaptive routing with a view of the whole network, decided once, when a connection is set up: it does not
    move a flow later, and a flow counts whether or not it is still under way. Switches that see only their own queues
    (adaptive routing of InfiniBand and Spectrum, DRILL, and leaves with CONGA to a degree) do worse than that; those
    that decide per packet or flowlet may do better, and `foretrain.network.routing.Spray` is their limit.

    Flows are set up destination by destination (in the order of the nodes these hang at), those of one destination in
    the order given. The same pair and connection get one path within a call of `paths`, but which one depends on what
    else is routed in that call; where the load is to be remembered, go on with `reload`.

    Attributes:
        topology: the network.
        load: bytes (or flows, where no sizes are given) that each link carries besides, float64 (links,). What counts
            is the ratio to `Topology.capacity`.
    """

    def __init__(self, topology: Topology, *, load: NDArray[np.float64] | None = None) -> None:
        self.topology = topology
        self.load = np.zeros(topology.links) if load is None else np.asarray(load, np.float64)
        if self.load.shape != (topology.links,):
            raise ConfigError("load", self.load.shape, "is not one number per link", f"give {topology.links}")
        if not (np.isfinite(self.load) & (self.load >= 0)).all():
            raise ConfigError("load", self.load.min(), "is not a load", "give bytes or flows, 0 or more")

    @cached_property
    def _ways(self) -> Ways:
        return Ways.of(self.topology)

    def reload(self, load: NDArray[np.float64]) -> Adaptive:
        """Return this policy where links carry ``load`` already, e.g. `link_load` of the flows under way."""
        other = Adaptive(self.topology, load=load)
        other.__dict__["_ways"] = self._ways
        return other

    def on(self, topology: Topology, staying: Paths | None = None) -> Adaptive:
        """Return this policy on another topology with the same links, where flows on ``staying`` are under way."""
        return Adaptive(topology, load=self.load if staying is None else self.load + link_load(staying, topology))

    def paths(
        self,
        sources: NDArray[np.int32],
        targets: NDArray[np.int32],
        connections: NDArray[np.int32],
        sizes: NDArray[np.float64] | None = None,
    ) -> Paths:
        """Return a shortest path of each flow, ``sizes`` bytes each; without sizes flows are counted.

        Raises:
            ConfigError: a flow has no way.
        """
        weights = np.ones(len(sources)) if sizes is None else np.asarray(sizes, np.float64)
        if len(weights) != len(sources) or not (np.isfinite(weights) & (weights >= 0)).all():
            raise ConfigError("sizes", len(weights), "are not sizes in bytes, one per flow", f"give {len(sources)}")
        once, which = _first_of_each(sources, targets, connections)
        total = np.bincount(which, weights, len(once)).astype(np.float64)
        found = self._ways.by_load(sources[once], targets[once], total, self.load.copy())
        return found.all(self.topology, sources[once], targets[once]).gather(which)


def link_load(paths: Paths, topology: Topology, sizes: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Return the bytes of flows of ``sizes`` on each link, or the number of flows; float64 (links,)."""
    weights = None if sizes is None else np.repeat(np.asarray(sizes, np.float64), np.diff(paths.first))
    return np.bincount(paths.links, weights, topology.links).astype(np.float64)


def _first_of_each(*keys: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first row of each combination of keys, in order, and the index of its combination for each row."""
    if not len(keys[0]):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    order = np.lexsort(keys)
    fresh = np.ones(len(order), np.bool_)
    fresh[1:] = np.any([np.diff(key[order]) != 0 for key in keys], axis=0)
    group = np.cumsum(fresh) - 1
    # lexsort is stable, so that the first of a group in order is the first that was given.
    starts = order[fresh]
    rank = np.empty_like(starts)
    rank[np.argsort(starts)] = np.arange(len(starts))
    which = np.empty_like(order)
    which[order] = rank[group]
    return np.sort(starts), which


def checked_seed(seed: int) -> int:
    """Return ``seed``; ConfigError where it is not one of 32 bits."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise ConfigError("seed", seed, "is not a whole number from 0 to 4294967295", "write e.g. seed=1")
    return int(seed)
