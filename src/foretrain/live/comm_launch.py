"""Communications that begin at one instant, and what they are handed to.

# Note [Starts of one instant]
All that begins at one instant is handed to the traffic at its end, ordered by rank and by position in its log: the
order must not tell which frame came first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from foretrain.simulation.world import START, TIMER, VirtualWorld
from foretrain.units import Time

Order: TypeAlias = tuple[int, int]
"""World rank, and position among all that it has posted."""


class CommTraffic(Protocol):
    """How communication crosses the network. It owns a reference to the world, and calls ``done`` through it."""

    def collective(
        self,
        operation: str,
        size: int,
        group: tuple[int, ...],
        splits: Mapping[int, tuple[int, ...]] | None,
        done: Callable[[], None],
    ) -> None:
        """Begins a collective now.

        Args:
            operation: of `OPERATIONS`.
            size: bytes, as COLLECTIVE says in `foretrain.live.event_log`; of uneven all-to-alls the most of any rank.
            group: world ranks in the group's order, whether executed or not.
            splits: of uneven all-to-alls, by executed world rank, bytes to each member in the group's order.
            done: to be called at its end.
        """
        ...

    def messages(self, transfers: Sequence[tuple[int, int, int]], done: Sequence[Callable[[], None]]) -> None:
        """Begins all ``transfers`` now: (source, target, bytes), different world ranks; one of ``done`` for each."""
        ...

    def regrouped(self) -> None:
        """The folding has learnt of a group."""
        ...


class PendingComm(Protocol):
    """A collective or message that all have come to."""

    @property
    def order(self) -> Order:
        """Its place among those that begin at the same instant."""
        ...

    def begin(self) -> None:
        """It begins now."""
        ...

    def end(self) -> None:
        """It is over now."""
        ...

    def transfer(self) -> tuple[int, int, int] | None:
        """(source, target, bytes) of a message; None of a collective."""
        ...

    def hand_to(self, traffic: CommTraffic) -> None:
        """Begins a collective in the network."""
        ...


class CommLaunches:
    """Lets communications begin; see Note [Starts of one instant].

    Args:
        world: whose time it is.
        traffic: what they are handed to.
    """

    def __init__(self, world: VirtualWorld, traffic: CommTraffic) -> None:
        self.world = world
        self._traffic = traffic
        self._due: dict[Time, list[PendingComm]] = {}

    def at(self, when: Time, meeting: PendingComm) -> None:
        """Begins ``meeting`` at ``when``."""
        due = self._due.get(when)
        if due is None:
            self._due[when] = [meeting]
            self.world.schedule(when, START, self._begin, when)
        else:
            due.append(meeting)

    def _begin(self, when: Time) -> None:
        due = sorted(self._due.pop(when), key=lambda meeting: meeting.order)
        transfers: list[tuple[int, int, int]] = []
        done: list[Callable[[], None]] = []
        for meeting in due:
            meeting.begin()
            transfer = meeting.transfer()
            if transfer is None:
                meeting.hand_to(self._traffic)
            elif transfer[0] == transfer[1]:
                self.world.schedule(when, TIMER, meeting.end)  # It crosses no network.
            else:
                transfers.append(transfer)
                done.append(meeting.end)
        if transfers:
            self._traffic.messages(transfers, done)
