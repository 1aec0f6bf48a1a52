"""Paths through a topology, found by networkx; and what plain Python prints in place of compiled kernels."""

import os
import subprocess
import sys

import networkx as nx
import numpy as np

from foretrain.network.topology.graph import Topology

COLUMNS = ("ranks", "first", "source", "target", "rate", "latency", "metric", "up", "background")


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
    same = all(np.array_equal(getattr(a, name), getattr(b, name)) for name in COLUMNS)
    return same and a.name == b.name and a.nodes == b.nodes


def interpreted(code: str) -> str:
    """What ``code`` prints where numba does not compile, without the white space around it."""
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    made = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()
