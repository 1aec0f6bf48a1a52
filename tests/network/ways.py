"""Ways through a topology, found by networkx."""

import networkx as nx
import numpy as np

from foretrain.network.topology.graph import Topology


def graph(topology: Topology) -> nx.DiGraph:
    """Capacities added up, without what ends cannot pass on."""
    made = nx.DiGraph()
    for link in range(topology.links):
        a, b = int(topology.source[link]), int(topology.target[link])
        before = made.edges[a, b]["capacity"] if made.has_edge(a, b) else 0.0
        made.add_edge(a, b, capacity=before + topology.capacity[link], metric=int(topology.metric[link]))
    return made


def shortest(topology: Topology, a: int, b: int) -> list[list[int]]:
    """All ways from rank a to rank b of the smallest metric over nodes that forward."""
    source, target = int(topology.ranks[a]), int(topology.ranks[b])
    passing = [i for i, node in enumerate(topology.nodes) if node.forwards or i in (source, target)]
    return list(nx.all_shortest_paths(graph(topology).subgraph(passing), source, target, weight="metric"))


def names(topology: Topology, path: list[int]) -> list[str]:
    return [topology.nodes[node].name for node in path]


def equal(a: Topology, b: Topology) -> bool:
    """Whether both are the same to the last bit."""
    columns = ("ranks", "first", "source", "target", "rate", "latency", "metric", "up", "background")
    same = all(np.array_equal(getattr(a, name), getattr(b, name)) for name in columns)
    return same and a.name == b.name and a.nodes == b.nodes
