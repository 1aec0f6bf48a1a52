"""Which collective suits a topology, and which of the plan's endpoints goes where.

A plan knows ranks and helpers only. What it needs to know of the network is read off the topology here: how many ranks
a server has, which switch can reduce, that the fabric is a BiGraph.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from foretrain.collective import Operation, Plan
from foretrain.collective.algorithms import ALGORITHMS, build
from foretrain.collective.hdrm import hdrm, hdrm_mapping
from foretrain.errors import ConfigError, unknown
from foretrain.network.topology import Topology

_CHUNK = 1 << 19
"""Bytes of a piece that trees and reducing switches pass on, one behind the other."""
_MOST_CHUNKS = 64
"""Pieces beyond which the first one's way, which is all that is not hidden, no longer counts."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """A plan and where it goes.

    Attributes:
        plan: the transfers.
        ranks: for each rank of the plan, which rank of the topology it is, int64.
        helpers: for each helper of the plan, the node it is on.
    """

    plan: Plan
    ranks: NDArray[np.int64]
    helpers: tuple[int, ...] = ()


def chunks(size: int) -> int:
    """How many pieces pipelines cut ``size`` bytes into: a power of two, so that few plans serve all sizes."""
    return 1 << (min(max(size // _CHUNK, 1), _MOST_CHUNKS).bit_length() - 1)


def arrange(
    name: str, operation: Operation, topology: Topology, ranks: Sequence[int], pieces: int = _MOST_CHUNKS
) -> Arrangement:
    """The collective called ``name`` among ``ranks`` of ``topology``, its pipelines in ``pieces``; see `chunks`.

    Raises:
        ConfigError: the name is unknown, or the topology lacks what the collective needs; says what.
    """
    members = np.asarray(ranks, np.int64)
    if name not in ALGORITHMS:
        raise unknown("collective", name, (*ALGORITHMS, "auto", "nccl"))
    if name == "hdrm":
        return _hdrm(operation, topology, members)
    if name == "hierarchical":
        local = ranks_per_server(topology, members)
        if local == 1 or local == len(members):
            raise ConfigError("collective", name, "needs several servers of several ranks", "use 'ring'")
        return Arrangement(build(name, operation, len(members), local=local), members)
    if name == "in_network":
        switch = _reducing(topology, members)
        return Arrangement(build(name, operation, len(members), chunks=pieces), members, (switch,))
    if name == "double_tree":
        return Arrangement(build(name, operation, len(members), chunks=pieces), members)
    if name == "parameter_server":
        return Arrangement(build(name, operation, len(members), servers=len(members), colocated=True), members)
    return Arrangement(build(name, operation, len(members)), members)


def suited(
    operation: Operation, topology: Topology, ranks: Sequence[int], pieces: int = _MOST_CHUNKS
) -> dict[str, Arrangement]:
    """Every collective, but for the parameter server, that can do ``operation`` among ``ranks``."""
    found = {}
    for name, offer in ALGORITHMS.items():
        if operation not in offer.operations or name == "parameter_server":
            continue
        try:
            found[name] = arrange(name, operation, topology, ranks, pieces)
        except ConfigError:
            continue  # That it does not suit is the answer.
    return found


def ranks_per_server(topology: Topology, ranks: NDArray[np.int64]) -> int:
    """How many of ``ranks`` each server has, if equally many that stand together; else 1."""
    servers = np.array([topology.nodes[node].server for node in topology.ranks[ranks]])
    if (servers < 0).any():
        return 1
    local = int((servers == servers[0]).sum())
    whole = len(ranks) % local == 0 and (servers.reshape(-1, local) == servers[::local, None]).all()
    return local if whole and len(set(servers[::local].tolist())) == len(ranks) // local else 1


def _reducing(topology: Topology, ranks: NDArray[np.int64]) -> int:
    """The switch that all ``ranks`` hang on and that can reduce."""
    common: set[int] | None = None
    for node in topology.ranks[ranks].tolist():
        near = set(topology.target[topology.first[node] : topology.first[node + 1]].tolist())
        common = near if common is None else common & near
    able = sorted(node for node in common or () if topology.nodes[node].reduces)
    if not able:
        raise ConfigError(
            "collective", "in_network", "needs a switch beside all ranks that reduces", "use a server with NVLS"
        )
    return able[0]


def _hdrm(operation: Operation, topology: Topology, ranks: NDArray[np.int64]) -> Arrangement:
    """HDRM among the places of a BiGraph; where a place is a server of several ranks, per shard between servers."""
    shape = re.fullmatch(r"bigraph\((\d+)x(\d+)\)", topology.name)
    if shape is None:
        raise ConfigError("collective", "hdrm", f"needs a BiGraph and not {topology.name}", "use 'halving_doubling'")
    switches, hosts = int(shape[1]), int(shape[2])
    local = len(topology.ranks) // (switches * hosts)
    count = len(ranks) // local
    if (ranks != np.arange(count * local)).any():
        raise ConfigError("ranks", ranks.tolist()[:8], "are not the first ones", "hdrm places a job by itself")
    seats = hdrm_mapping(switches, hosts, count).host
    if local == 1:
        return Arrangement(hdrm(operation, count, switches=switches, hosts=hosts), seats)
    outer = partial(hdrm, switches=switches, hosts=hosts)
    plan = build("hierarchical", operation, len(ranks), local=local, outer=outer)
    return Arrangement(plan, (seats[:, None] * local + np.arange(local)).reshape(-1))
