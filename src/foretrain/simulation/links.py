"""Links, pipes and operations in virtual time: the resources that carry the communication of one job.

On a link transfers of one lane follow each other and lanes share it. A *lane* is what one connection sends: first in,
first out, whole. Lanes of one wire that are busy share it equally, as TCP connections through one port do.

Pipes are the simple cluster's network. Each pipe serves chunks one after the other, whole, in the order in which they
came: enqueued communication cannot be preempted. A route of several hops stores and forwards chunk by chunk, so small
chunks pipeline.

Operations are the collectives of one job on a topology: one after the other, as on one stream of NCCL.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from foretrain.network.switch_cluster import Hop, Route
from foretrain.simulation.world import ARRIVAL, VirtualWorld
from foretrain.tasks import Chunk, Op
from foretrain.trace import Span, Timeline
from foretrain.units import Time

if TYPE_CHECKING:
    from foretrain.network.deployment import Deployment

Label = Callable[[Chunk], tuple[str, int]]
"""A chunk's name and step, for the timeline."""


class Pipes:
    """First-in-first-out pipes.

    Args:
        routes: the hops of each operation.
        timeline: where to record who used which pipe when; None records nothing.
        label: names a chunk for the timeline.
    """

    def __init__(
        self, routes: Mapping[Op, Route], timeline: Timeline | None = None, label: Label = lambda _: ("", 0)
    ) -> None:
        self._routes = routes
        self._timeline = timeline
        self._label = label
        self._free: dict[str, Time] = {hop.pipe: 0 for route in routes.values() for hop in route}

    def carry(self, chunk: Chunk, world: VirtualWorld, done: Callable[[Chunk], None]) -> None:
        """Send ``chunk`` through every hop of its route."""
        self._enter(chunk, self._routes[chunk.op], 0, world, done)

    def _enter(
        self, chunk: Chunk, route: Route, place: int, world: VirtualWorld, done: Callable[[Chunk], None]
    ) -> None:
        hop = route[place]
        arrived = self._serve(hop, chunk, world.now()) + hop.latency
        if place + 1 == len(route):
            world.schedule(arrived, ARRIVAL, done, chunk)
        else:
            world.schedule(arrived, ARRIVAL, self._enter, chunk, route, place + 1, world, done)

    def _serve(self, hop: Hop, chunk: Chunk, now: Time) -> Time:
        free = self._free[hop.pipe]
        start = free if free > now else now
        end = self._free[hop.pipe] = start + hop.occupancy(chunk.size)
        if self._timeline is not None:
            name, step = self._label(chunk)
            self._timeline.add(Span(hop.pipe, "communication", name, step, start, end, chunk.size))
        return end


Out = Callable[[Time], None]
"""Callback at the end of a transfer, with the time at which it began."""


class Lane(Protocol):
    """Lane of a link: the transfers of one connection, one after the other."""

    def send(self, work: Time, world: VirtualWorld, out: Out) -> None:
        """Send a transfer that takes ``work`` ps without contention, behind all that was sent before."""
        ...


class ExclusiveLink:
    """Link with a single lane."""

    def __init__(self) -> None:
        self._free: Time = 0

    def send(self, work: Time, world: VirtualWorld, out: Out) -> None:
        """See `Lane`."""
        start = max(self._free, world.now())
        self._free = start + work
        world.schedule(self._free, ARRIVAL, out, start)


class SharedLink:
    """Link of ``count`` lanes that share its rate.

    What is left of a lane's head is counted in parts of a picosecond, so small that equal shares are whole.
    """

    def __init__(self, count: int) -> None:
        self.lanes: tuple[Lane, ...] = tuple(_Shared(self) for _ in range(count))
        self._busy: list[_Shared] = []
        self._parts = math.lcm(*range(1, count + 1))
        self._since: Time = 0
        self._asked = 0

    def begin(self, lane: _Shared, world: VirtualWorld) -> None:
        """Record that ``lane`` has become busy."""
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
        """Schedule `_leave` for the end of the next transfer; a new one makes it void."""
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
    """Lane of a `SharedLink`."""

    def __init__(self, wire: SharedLink) -> None:
        self._wire = wire
        self.waiting: deque[tuple[Time, Out]] = deque()
        self.start: Time = 0
        self.left = 0

    def send(self, work: Time, world: VirtualWorld, out: Out) -> None:
        """See `Lane`."""
        self.waiting.append((work, out))
        if len(self.waiting) == 1:
            self._wire.begin(self, world)

    def next(self, now: Time, parts: int) -> None:
        """Begin the first waiting transfer."""
        self.start, self.left = now, self.waiting[0][0] * parts


LANE = "network"
"""The timeline's lane for collectives on a topology."""


class Operations:
    """Carrier of collectives, first in, first out: each takes θ and its time without contention in the fluid network.

    Args:
        where: the job's deployment.
        timeline: where to record what was sent when; None records nothing.
        label: names a chunk for the timeline.
    """

    def __init__(self, where: Deployment, timeline: Timeline | None = None, label: Label = lambda _: ("", 0)) -> None:
        self._where = where
        self._timeline = timeline
        self._label = label
        self._free: Time = 0

    def carry(self, chunk: Chunk, world: VirtualWorld, done: Callable[[Chunk], None]) -> None:
        """Send ``chunk`` behind all that were started before."""
        start = max(self._free, world.now())
        self._free = start + self._where.overhead + self._where.duration(chunk.op, chunk.size)
        if self._timeline is not None:
            name, step = self._label(chunk)
            self._timeline.add(Span(LANE, "communication", name, step, start, self._free, chunk.size))
        world.schedule(self._free, ARRIVAL, done, chunk)
