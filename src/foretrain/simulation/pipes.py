"""Pipes: the simple cluster's network in virtual time.

Each pipe serves chunks one after the other, whole, in the order in which they came: enqueued communication cannot be
preempted. A route of several hops stores and forwards chunk by chunk, so small chunks pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from foretrain.network.route import Hop, Route
from foretrain.simulation.world import ARRIVAL, VirtualWorld
from foretrain.tasks import Chunk, Op
from foretrain.trace import Span, Timeline
from foretrain.units import Time

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
        """Sends ``chunk`` through every hop of its route."""
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
