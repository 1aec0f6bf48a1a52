"""Per-packet spraying, modelled as bundled links."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError
from foretrain.network.program import Paths
from foretrain.network.routing.bundles import contract, groups
from foretrain.network.routing.ecmp import checked_seed
from foretrain.network.routing.route_search import Ways
from foretrain.network.topology.graph import Topology


class Spray:
    """Every packet takes another of the equal ways, so that a flow sees switches and links that are alike as one.

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
        """The same bundles of another topology with the same links as ``fabric``."""
        if len(topology.nodes) != len(self.fabric.nodes):
            raise ConfigError("topology", topology.name, "is not the one that is sprayed over", "change the fabric")
        return Spray(topology, seed=self.seed, group=self.group)

    def paths(self, sources: NDArray[np.int32], targets: NDArray[np.int32], connections: NDArray[np.int32]) -> Paths:
        """The bundled path of each flow between nodes of ``topology``.

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
