"""Wires in virtual time: what is sent on one goes one after the other; what is sent side by side shares it.

A *lane* is what one connection sends: first in, first out, whole. Lanes of one wire that are busy share it equally, as
TCP connections through one port do.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

from foretrain.simulation.world import ARRIVAL, VirtualWorld
from foretrain.units import Time

Out = Callable[[Time], None]
"""Called when something is out, with the time when its turn came."""


class Link(Protocol):
    """What one connection sends."""

    def send(self, work: Time, world: VirtualWorld, out: Out) -> None:
        """Sends what takes ``work`` ps with the wire to itself, behind all that was sent before."""
        ...


class ExclusiveLink:
    """A lane that has its wire to itself."""

    def __init__(self) -> None:
        self._free: Time = 0

    def send(self, work: Time, world: VirtualWorld, out: Out) -> None:
        """See `Link`."""
        start = max(self._free, world.now())
        self._free = start + work
        world.schedule(self._free, ARRIVAL, out, start)


class SharedLink:
    """A wire of ``count`` lanes.

    What is left of a lane's head is counted in parts of a picosecond, so small that equal shares are whole.
    """

    def __init__(self, count: int) -> None:
        self.lanes: tuple[Link, ...] = tuple(_Shared(self) for _ in range(count))
        self._busy: list[_Shared] = []
        self._parts = math.lcm(*range(1, count + 1))
        self._since: Time = 0
        self._asked = 0

    def begin(self, lane: _Shared, world: VirtualWorld) -> None:
        """``lane``, which was not busy, is."""
        self._progress(world.now())
        self._busy.append(lane)
        lane.next(world.now(), self._parts)
        self._arm(world)

    def _progress(self, now: Time) -> None:
        if self._busy:
            done = (now - self._since) * (self._parts // len(self._busy))
            for lane in self._busy:
                lane.left -= done
        self._since = now

    def _arm(self, world: VirtualWorld) -> None:
        """Has itself called when the next head is out, if nobody begins before."""
        self._asked += 1
        if self._busy:
            least = max(0, min(lane.left for lane in self._busy))
            wait = -(-least // (self._parts // len(self._busy)))
            world.schedule(self._since + wait, ARRIVAL, self._leave, self._asked, world)

    def _leave(self, asked: int, world: VirtualWorld) -> None:
        if asked != self._asked:
            return  # Somebody began in between, and changed when.
        now = world.now()
        self._progress(now)
        out = [lane for lane in self._busy if lane.left <= 0]
        for lane in out:
            start, call = lane.start, lane.waiting.popleft()[1]
            world.schedule(now, ARRIVAL, call, start)
            if lane.waiting:
                lane.next(now, self._parts)
            else:
                self._busy.remove(lane)
        self._arm(world)


class _Shared:
    """One of the lanes of a `SharedLink`."""

    def __init__(self, wire: SharedLink) -> None:
        self._wire = wire
        self.waiting: deque[tuple[Time, Out]] = deque()
        self.start: Time = 0
        self.left = 0

    def send(self, work: Time, world: VirtualWorld, out: Out) -> None:
        """See `Link`."""
        self.waiting.append((work, out))
        if len(self.waiting) == 1:
            self._wire.begin(self, world)

    def next(self, now: Time, parts: int) -> None:
        """The head's turn has come."""
        self.start, self.left = now, self.waiting[0][0] * parts
