"""Links fail under way: which flows need another path, and which one."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError
from foretrain.network.flow_lowering import Router
from foretrain.network.program import Paths
from foretrain.network.routing.route_search import Ways, others, pair
from foretrain.network.topology.graph import Topology


class PortableRouter(Router, Protocol):
    """A router that can be had for another topology too."""

    def on(self, topology: Topology, staying: Paths | None = None) -> PortableRouter:
        """The same policy on ``topology``, where flows on the paths ``staying`` remain."""
        ...


def reroute(
    router: PortableRouter,
    paths: Paths,
    sources: NDArray[np.int32],
    targets: NDArray[np.int32],
    connections: NDArray[np.int32],
    changed: Topology,
) -> tuple[NDArray[np.int32], Paths]:
    """New paths for the flows whose path has a link that is down; all others stay where they are.

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
