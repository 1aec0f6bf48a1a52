"""Choice of the collective for a topology, and of the node for each endpoint of its plan.

A plan knows ranks and helpers only. What it needs to know of the network is read off the topology here: how many ranks
a server has, which switch can reduce, that the fabric is a BiGraph, orders of ranks for rings that use every NVLink of
a mesh and every NIC of a server, and NCCL's choice for ranks of a topology.
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
from foretrain.collective.nccl.choice import Choice, choose
from foretrain.collective.nccl.generation import GPUS
from foretrain.collective.ring import ring
from foretrain.errors import ConfigError, unknown
from foretrain.network.topology.graph import Topology
from foretrain.network.topology.metrics import BiGraph, as_bigraph

MOST_CHANNELS = 8
"""Rings at once: as many as the most NICs that servers have."""


def ring_orders(topology: Topology, ranks: NDArray[np.int64], local: int) -> NDArray[np.int64]:
    """Return orders of the job's ranks (by their number in the job), int64 (channels, ranks).

    In one server whose GPUs are linked to each other, edge-disjoint Hamiltonian cycles over these links, found
    greedily. Over servers of ``local`` ranks with several NICs, one channel per NIC: channel c goes through server s
    from rank c − s on, so that what leaves a server on a rail enters the next one on the same. Else the order given.
    """
    count = len(ranks)
    plain = np.arange(count)[None]
    if local < 3:
        return plain
    inside = _cycles(_links(topology, ranks[:local]))
    cycles = inside if len(inside) else [list(range(local))]
    if local == count:
        return np.array(cycles)
    nics = _nics(topology, ranks)
    if nics < 2:
        return np.concatenate([np.arange(0, count, local)[:, None] + np.array(cycles[0])], axis=0).reshape(1, -1)
    channels = min(nics, local, MOST_CHANNELS)
    servers = np.arange(count // local)
    orders = []
    for channel in range(channels):
        cycle = np.array(cycles[channel % len(cycles)])
        starts = (channel * (local // channels) - servers) % local
        within = cycle[(starts[:, None] + np.arange(local)) % local]
        orders.append((servers[:, None] * local + within).reshape(-1))
    return np.array(orders)


def _links(topology: Topology, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rate between each two ranks, in multiples of the slowest direct link's; 0 where there is none."""
    nodes = topology.ranks[ranks]
    number = np.full(len(topology.nodes), -1)
    number[nodes] = np.arange(len(nodes))
    source, target = number[topology.source], number[topology.target]
    direct = (source >= 0) & (target >= 0)
    rate = np.zeros((len(nodes), len(nodes)))
    np.add.at(rate, (source[direct], target[direct]), topology.capacity[direct])
    least = rate[rate > 0].min(initial=np.inf)
    return (rate / least + 1e-9).astype(np.int64)


def _cycles(links: NDArray[np.int64]) -> list[list[int]]:
    """Return directed Hamiltonian cycles that use no link more often than it exists."""
    left, found = links.copy(), []
    while len(found) < MOST_CHANNELS and (cycle := _cycle(left)):
        for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True):
            left[a, b] -= 1
        found.append(cycle)
    return found


def _cycle(links: NDArray[np.int64]) -> list[int]:
    """Return one Hamiltonian cycle from 0 on, over the most plentiful links first; empty if there is none."""
    count = len(links)
    if count > 16:  # No mesh is that large, and the search is exponential.
        return []
    path, seen = [0], {0}

    def extend() -> bool:
        if len(path) == count:
            return bool(links[path[-1], 0] > 0)
        here = path[-1]
        for near in np.argsort(-links[here], kind="stable").tolist():
            if links[here, near] > 0 and near not in seen:
                path.append(near)
                seen.add(near)
                if extend():
                    return True
                seen.remove(path.pop())
        return False

    return path if extend() else []


def _nics(topology: Topology, ranks: NDArray[np.int64]) -> int:
    """Return the number of NICs of the job's first server."""
    server = topology.nodes[topology.ranks[ranks[0]]].server
    return sum(node.kind == "nic" and node.server == server for node in topology.nodes) if server >= 0 else 0


_CHUNK = 1 << 19
"""Bytes of a piece that trees and reducing switches pass on, one behind the other."""
_MOST_CHUNKS = 64
"""Pieces beyond which the first one's way, which is all that is not hidden, no longer counts."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """A plan and the places of its endpoints.

    Attributes:
        plan: the transfers.
        ranks: for each rank of the plan, which rank of the topology it is, int64.
        helpers: for each helper of the plan, the node it is on.
    """

    plan: Plan
    ranks: NDArray[np.int64]
    helpers: tuple[int, ...] = ()


def chunks(size: int) -> int:
    """Return the pieces of ``size`` bytes in a pipeline: a power of two, so that few plans serve all sizes."""
    return 1 << (min(max(size // _CHUNK, 1), _MOST_CHUNKS).bit_length() - 1)


def arrange(
    name: str, operation: Operation, topology: Topology, ranks: Sequence[int], pieces: int = _MOST_CHUNKS
) -> Arrangement:
    """Arrange the collective called ``name`` among ``ranks``, its pipelines in ``pieces``; see `chunks`.

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
    """Return every collective, but for the parameter server, that can do ``operation`` among ``ranks``."""
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
    """Return the number of ``ranks`` in each server, if it is equal and they stand together; else 1."""
    servers = np.array([topology.nodes[node].server for node in topology.ranks[ranks]])
    if (servers < 0).any():
        return 1
    local = int((servers == servers[0]).sum())
    whole = len(ranks) % local == 0 and (servers.reshape(-1, local) == servers[::local, None]).all()
    return local if whole and len(set(servers[::local].tolist())) == len(ranks) // local else 1


def _reducing(topology: Topology, ranks: NDArray[np.int64]) -> int:
    """Return the switch that all ``ranks`` are linked to and that can reduce."""
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
    """Arrange HDRM among the places of a BiGraph; between servers of several ranks, per shard."""
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
    """Return the BiGraph that a job on ``places`` has for itself: switches, hosts of each, the place of each seat.

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


_PLANS = {"ring": "ring", "tree": "double_tree", "nvls": "in_network", "direct": "direct"}
"""Our collective for NCCL's algorithm inside one server, and where a server is one rank."""
_RINGS = 512
"""Ranks over several servers up to which a ring is simulated as one, on all its channels."""


def choice_on(
    topology: Topology, ranks: Sequence[int], gpu: str | None, operation: Operation, size: int
) -> tuple[Choice, str]:
    """Return NCCL's choice for ``size`` bytes among ``ranks``, and the name of the collective to simulate.

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
