"""A single shortest path for each pair of nodes."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

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
