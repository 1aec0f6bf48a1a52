"""Adaptive routing at flow set-up: a new flow goes where the least is under way."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError
from foretrain.network.program import Paths
from foretrain.network.routing.route_search import Ways
from foretrain.network.topology.graph import Topology


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
