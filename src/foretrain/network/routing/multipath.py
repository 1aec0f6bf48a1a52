"""Per-packet spraying, way by way: what packets need, where `foretrain.network.routing.spray` is for rates."""

from __future__ import annotations

from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from foretrain.network.program import Paths
from foretrain.network.routing.hop_by_hop import checked_seed
from foretrain.network.routing.route_search import Ways
from foretrain.network.topology.graph import Topology

_MOST: Final = 64
"""Ways of a flow: as many as a sender remembers congestion of."""
_DRAWS: Final = 16
"""Ways that are drawn at a time."""


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
