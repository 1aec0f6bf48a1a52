"""Which collective suits a topology, and which of the plan's endpoints goes where.

A plan knows ranks and helpers only. What it needs to know of the network is read off the topology here: how many ranks
a server has, which switch can reduce, that the fabric is a BiGraph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from foretrain.collective import Operation, Plan
from foretrain.collective.algorithms import ALGORITHMS, build
from foretrain.collective.hdrm import hdrm, hdrm_mapping
from foretrain.collective.ring import ring
from foretrain.errors import ConfigError, unknown
from foretrain.network.ring_search import ring_orders
from foretrain.network.topology.detection import BiGraph, as_bigraph
from foretrain.network.topology.graph import Topology

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
        inner = partial(ring, orders=ring_orders(topology, members[:local], local))
        return Arrangement(build(name, operation, len(members), local=local, inner=inner), members)
    if name == "ring":
        orders = ring_orders(topology, members, ranks_per_server(topology, members))
        return Arrangement(build(name, operation, len(members), orders=orders), members)
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
    shape = as_bigraph(topology)
    if shape is None:
        raise ConfigError("collective", "hdrm", f"needs a BiGraph and not {topology.name}", "use 'halving_doubling'")
    places = np.unique(shape.place[ranks])
    local = len(ranks) // len(places)
    members = ranks[np.argsort(shape.place[ranks], kind="stable")]
    if len(ranks) % len(places) or (shape.place[members].reshape(-1, local) != places[:, None]).any():
        raise ConfigError("ranks", ranks.tolist()[:8], "are not whole servers", "hdrm needs all ranks of each server")
    switches, hosts, seats = _seats(shape, places)
    # Seat by seat the number of its place among the job's, and the ranks there.
    chosen = members.reshape(-1, local)[np.searchsorted(places, seats)]
    if local == 1:
        return Arrangement(hdrm(operation, len(places), switches=switches, hosts=hosts), chosen.reshape(-1))
    outer = partial(hdrm, switches=switches, hosts=hosts)
    plan = build("hierarchical", operation, len(ranks), local=local, outer=outer)
    return Arrangement(plan, chosen.reshape(-1))


def _seats(shape: BiGraph, places: NDArray[np.int64]) -> tuple[int, int, NDArray[np.int64]]:
    """The BiGraph that a job on ``places`` has for itself: switches, hosts of each, and the place of each of its seats.

    Either equally many places at equally many switches of both parts, or the hosts that `hdrm_mapping` would choose.
    """
    at = shape.switch[places]
    used, counts = np.unique(at, return_counts=True)
    upper = int((used < shape.half).sum())
    if len(used) == 1:
        return 2, len(places), places
    if 2 * upper == len(used) and counts.min() == counts.max():
        hosts = int(counts[0])
        seats = hdrm_mapping(len(used), hosts).host
        return len(used), hosts, places[np.argsort(at, kind="stable")][seats]
    everywhere = np.bincount(shape.switch, minlength=2 * shape.half)
    hosts = int(everywhere.max())
    if everywhere.min() == hosts:
        seats = hdrm_mapping(2 * shape.half, hosts, len(places)).host
        chosen = np.argsort(shape.switch, kind="stable")[seats]
        if np.array_equal(np.sort(chosen), places):
            return 2 * shape.half, hosts, chosen
    raise ConfigError(
        "ranks",
        places.tolist()[:8],
        "are not on equally many switches of both parts, equally many on each",
        "choose such places, or those of foretrain.collective.hdrm_mapping",
    )
