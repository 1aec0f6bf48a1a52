"""NCCL's choice for ranks of a topology: which collective of ours stands for its algorithm, and at which cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foretrain.collective import Operation
from foretrain.collective.nccl.choice import Choice, choose
from foretrain.collective.nccl.generation import GPUS
from foretrain.errors import ConfigError
from foretrain.network.collective_placement import ranks_per_server
from foretrain.network.topology.graph import Topology

_PLANS = {"ring": "ring", "tree": "double_tree", "nvls": "in_network", "direct": "direct"}
"""Our collective for NCCL's algorithm inside one server, and where a server is one rank."""
_RINGS = 512
"""Ranks over several servers up to which a ring is simulated as one, on all its channels."""


def choice_on(
    topology: Topology, ranks: Sequence[int], gpu: str | None, operation: Operation, size: int
) -> tuple[Choice, str]:
    """What NCCL would do with ``size`` bytes among ``ranks``, and the name of the collective to simulate.

    Across servers of several GPUs a ring has a channel for each NIC; ``hierarchical`` stands for trees, and for rings
    of very many ranks, as it uses all NICs at once as well.

    Raises:
        ConfigError: the GPU is not named or not known.
    """
    if gpu is None:
        raise ConfigError(
            "device", None, "does not say which GPU NCCL runs on", f"write e.g. device={next(iter(GPUS))}"
        )
    members = np.asarray(ranks, np.int64)
    local = ranks_per_server(topology, members)
    several = local < len(members)
    rate = _outside(topology) if several else None
    choice = choose(operation, size, len(members), gpu, ranks_per_server=local, inter_rate=rate)
    name = _PLANS.get(choice.algorithm, "ring")
    if several and local > 1 and (name not in ("ring", "direct") or len(members) > _RINGS):
        name = "hierarchical"
    return choice, name


def _outside(topology: Topology) -> float:
    """Bytes/s that each rank has to other servers: what enters its server, shared by its ranks."""
    nodes = topology.nodes
    server = np.array([node.server for node in nodes])
    ends = np.isin(np.arange(len(nodes)), topology.ranks)
    # A rank without a server is its own: what enters it comes from elsewhere.
    inside = (server >= 0) | ends
    across = inside[topology.target] & (
        (server[topology.source] != server[topology.target]) | (server[topology.target] < 0)
    )
    into = topology.capacity[across].sum()
    return float(into / len(topology.ranks))
