"""Benchmark of one collective alone on a network: time, bus bandwidth as nccl-tests define it, and link use."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretrain.collective import Operation
from foretrain.collective.nccl.variants import bus_bandwidth
from foretrain.network.deployment import Deployment
from foretrain.network.fidelity import FLUID, Fidelity
from foretrain.network.packet import Outcome
from foretrain.network.topology.graph import Topology
from foretrain.units import SECOND, Time


@dataclass(frozen=True, slots=True, eq=False)
class CollectiveBenchmark:
    """Time, bandwidth and link use of one collective alone on a network.

    Attributes:
        name: the collective that carried it.
        operation, size: what was asked, bytes in the sense of `foretrain.collective.Plan.size`.
        ranks: how many took part.
        time: ps, without θ.
        least: ps below which no collective can be: what the slowest port must send or receive at the least.
        topology: the network that its routing knows.
        carried: bytes that crossed each link, float64 (links,). Packets have headers and are acknowledged; where flows
            are in nobody's way this may be more than a link can carry.
        fidelity: how closely it was simulated.
        outcome: what came of its packets, where they were simulated.
    """

    name: str
    operation: Operation
    size: int
    ranks: int
    time: Time
    least: Time
    topology: Topology
    carried: NDArray[np.float64]
    fidelity: Fidelity = FLUID
    outcome: Outcome | None = None

    @property
    def bandwidth(self) -> float:
        """Bus bandwidth, bytes/s, as nccl-tests define it."""
        return bus_bandwidth(self.operation, self.size, self.ranks, self.time)

    @property
    def utilisation(self) -> NDArray[np.float64]:
        """Return the share of each link that is used over the whole time: 0 to 1, more only in an ideal network."""
        could = self.topology.capacity * (self.time / SECOND)
        return np.divide(self.carried, could, out=np.zeros(len(could)), where=could > 0)

    @property
    def busiest(self) -> tuple[str, str, float]:
        """The most used link: from, to, and how much of it; of equally used ones the first."""
        used = self.utilisation
        link = int(np.flatnonzero(used >= used.max() * (1 - 1e-9))[0])
        nodes = self.topology.nodes
        source, target = nodes[self.topology.source[link]].name, nodes[self.topology.target[link]].name
        return source, target, float(used[link])


def exchange(
    place: Deployment,
    operation: Operation,
    size: int,
    collective: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CollectiveBenchmark:
    """Simulate one collective of ``size`` bytes on ``place``, by its own collective or another.

    Args:
        place: where; its fidelity must not be ``"auto"``.
        operation, size, collective: what, and by which algorithm.
        progress: told now and then how many packets have come, of how many.
    """
    name = collective or place.collective_at(size, operation)
    program = place.program(operation, size, collective=collective)
    topology, fidelity, outcome = place.network, place.fidelity, None
    if fidelity.level == "packet":
        outcome = fidelity.packets(topology).run(program, progress=progress)
        finish, carried = outcome.finish.max(), outcome.ports.bytes.sum(axis=1)
    else:
        finish = fidelity.finish(program, topology).max()
        each = np.repeat(program.size * program.steps, np.diff(program.paths.first))
        carried = np.bincount(program.paths.links, each, topology.links)
    return CollectiveBenchmark(
        name=name,
        operation=operation,
        size=size,
        ranks=place.total_gpus,
        time=math.ceil(finish),
        least=_least(place, operation, size),
        topology=topology,
        carried=carried.astype(np.float64),
        fidelity=fidelity,
        outcome=outcome,
    )


def _least(place: Deployment, operation: Operation, size: int) -> Time:
    """Return the time that the slowest port needs for the bytes it must carry.

    An all-reduce that the network itself reduces has to carry S.
    """
    ranks = place.total_gpus
    topology = place.topology
    nodes = topology.ranks[list(place.members)]
    ends = (topology.source, topology.target)
    slowest = min(np.bincount(end, topology.capacity, len(topology.nodes))[nodes].min() for end in ends)
    share = (ranks - 1) / ranks
    if operation == "broadcast":
        share = 1.0
    elif operation == "all_reduce":
        share = 1.0 if any(node.reduces for node in topology.nodes) else 2 * share
    return math.ceil(share * size / slowest * SECOND)
