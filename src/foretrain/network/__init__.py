"""Networks on which gradients travel: simple clusters, jobs deployed on topologies, and routes of chunks.

Only the simple cluster is imported here. What simulates flows (`deployment`, `fluid`, `packet`, `routing`,
`deployment_notation`) needs numba and is imported where it is used, so that commands that do without it start at once.
"""

from foretrain.network.notation import Place, cluster, load, preset
from foretrain.network.switch_cluster import Cluster, Exchange, Hop, Route

__all__ = ["Cluster", "Exchange", "Hop", "Place", "Route", "cluster", "load", "preset"]
