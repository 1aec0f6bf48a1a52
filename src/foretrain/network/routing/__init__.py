"""Which links the bytes of a flow cross: one policy per file, and new paths when links fail.

    route = router(topology, "ecmp", seed=1)
    paths = route.paths(sources, targets, connections)

Every policy takes shortest ways only (the sum of `Topology.metric`), over links that are up and through nodes that
forward; only a table may say otherwise.
"""

from foretrain.network.routing.adaptive import Adaptive, link_load
from foretrain.network.routing.bundles import bundled, contract, groups
from foretrain.network.routing.choice import Name, router
from foretrain.network.routing.ecmp import Ecmp
from foretrain.network.routing.failure import PortableRouter, reroute
from foretrain.network.routing.multipath import Scatter
from foretrain.network.routing.shortest import Shortest
from foretrain.network.routing.spray import Spray
from foretrain.network.routing.static import Static

__all__ = [
    "Adaptive",
    "Ecmp",
    "Name",
    "PortableRouter",
    "Scatter",
    "Shortest",
    "Spray",
    "Static",
    "bundled",
    "contract",
    "groups",
    "link_load",
    "reroute",
    "router",
]
