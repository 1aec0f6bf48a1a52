"""Where gradients travel: clusters in their simple form, and the routes a chunk takes through them."""

from foretrain.network.notation import cluster, load, preset
from foretrain.network.route import Hop, Route
from foretrain.network.star import Cluster, Exchange

__all__ = ["Cluster", "Exchange", "Hop", "Route", "cluster", "load", "preset"]
