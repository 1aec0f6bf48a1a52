"""Routing hop by hop over shortest ways: one for each pair of nodes, or one of several by a flow's hash (ECMP)."""

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


def checked_seed(seed: int) -> int:
    """Return ``seed``; ConfigError where it is not one of 32 bits."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise ConfigError("seed", seed, "is not a whole number from 0 to 4294967295", "write e.g. seed=1")
    return int(seed)
