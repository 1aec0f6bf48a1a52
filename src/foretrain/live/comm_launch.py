"""Communications that begin at one instant, handed to the network in a fixed order.

# Note [Starts of one instant]
All that begins at one instant is handed to the traffic at its end, ordered by rank and by position in its log: the
order must not tell which frame came first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from foretrain.live.network_traffic import NetworkTraffic
from foretrain.simulation.world import START, TIMER, VirtualWorld
from foretrain.units import Time

Order: TypeAlias = tuple[int, int]
"""World rank, and position among all that it has posted."""


class CollectiveRequest(NamedTuple):
    """The arguments of `NetworkTraffic.collective`, less ``done``."""

    operation: str
    size: int
    group: tuple[int, ...]
    splits: Mapping[int, tuple[int, ...]] | None = None


@dataclass(frozen=True, slots=True)
class PendingComm:
    """Communication that all members have reached, or decision of a policy at the same instant.

    Attributes:
        order: its rank among those that begin at the same instant.
        request: the collective, or (source, target, bytes) of a message; None if it crosses no network.
        on_start: called when it begins.
        on_end: called when the network is through with ``request``.
    """

    order: Order
    request: CollectiveRequest | tuple[int, int, int] | None
    on_start: Callable[[], None]
    on_end: Callable[[], None] = lambda: None


class CommLaunches:
    """Queue of communications by the instant at which they begin; see Note [Starts of one instant].

    Args:
        world: the virtual clock.
        traffic: the network that carries them.
    """

    def __init__(self, world: VirtualWorld, traffic: NetworkTraffic) -> None:
        self.world = world
        self._traffic = traffic
        self._due: dict[Time, list[PendingComm]] = {}

    def at(self, when: Time, comm: PendingComm) -> None:
        """Begin ``comm`` at ``when``."""
        due = self._due.get(when)
        if due is None:
            self._due[when] = [comm]
            self.world.schedule(when, START, self._begin, when)
        else:
            due.append(comm)

    def _begin(self, when: Time) -> None:
        transfers: list[tuple[int, int, int]] = []
        done: list[Callable[[], None]] = []
        for comm in sorted(self._due.pop(when), key=attrgetter("order")):
            comm.on_start()
            request = comm.request
            if isinstance(request, CollectiveRequest):
                self._traffic.collective(*request, comm.on_end)
            elif request is not None and request[0] == request[1]:
                self.world.schedule(when, TIMER, comm.on_end)  # It crosses no network.
            elif request is not None:
                transfers.append(request)
                done.append(comm.on_end)
        if transfers:
            self._traffic.messages(transfers, done)
