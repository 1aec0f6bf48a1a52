"""Cores of hosts in virtual time, and the ends of messages that queue for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from foretrain.network.host_cpu import CpuCost, HostCpu
from foretrain.network.switch_cluster import Cluster
from foretrain.simulation.world import ARRIVAL, VirtualWorld
from foretrain.units import Time

Then = Callable[[], None]


class HostCores:
    """Cores that serve messages in the order in which they came: one message runs on one core."""

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._free: Time = 0
        self._last: Time = 0

    def take(self, work: Time, count: Fraction, world: VirtualWorld, then: Then) -> None:
        """Serve ``count`` messages of ``work`` ps each, which come at once; call ``then`` when the last is served.

        They keep all cores for their share of the time, and the last of them is through after ``work`` at the earliest.
        """
        start = max(self._free, world.now())
        self._free = start + math.ceil(work * count / self._cores)
        self._last = max(self._free, start + work, self._last)
        world.schedule(self._last, ARRIVAL, then)


class MessageEnd(NamedTuple):
    """Workers, or servers, that send and receive: one of this worker's messages is ``alike`` on their cores."""

    cores: HostCores
    cost: CpuCost
    alike: Fraction

    def handle(self, size: int, world: VirtualWorld, then: Then) -> None:
        """Spend the CPU time of a message of ``size`` bytes, then call ``then``."""
        self.cores.take(self.cost.time(size), self.alike, world, then)


class UnlimitedEnd:
    """End of messages that take no CPU time."""

    def handle(self, size: int, world: VirtualWorld, then: Then) -> None:
        """Call ``then`` now."""
        then()


def ends(place: Cluster) -> tuple[MessageEnd | UnlimitedEnd, MessageEnd | UnlimitedEnd]:
    """Return the ends of a message on ``place``: the worker's and the server's, whose cores may be the same."""
    cpu: HostCpu | None = place.cpu
    if cpu is None:
        return UnlimitedEnd(), UnlimitedEnd()
    workers = HostCores(cpu.cores)
    if cpu.together:
        # Those of all workers, which come at the same time.
        everyone = Fraction(place.workers)
        return MessageEnd(workers, cpu.worker, everyone), MessageEnd(workers, cpu.server, everyone)
    beside = place.exchange == "ps_colocated"
    servers = workers if beside else HostCores(cpu.cores)
    share = Fraction(1) if beside else Fraction(place.workers, place.servers)
    return MessageEnd(workers, cpu.worker, Fraction(1)), MessageEnd(servers, cpu.server, share)
