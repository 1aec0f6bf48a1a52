"""Collectives of one job on a topology, in virtual time: one after the other, as on one stream of NCCL."""

from __future__ import annotations

from collections.abc import Callable

from foretrain.network.deployment import Deployment
from foretrain.simulation.pipes import Label
from foretrain.simulation.world import ARRIVAL, VirtualWorld
from foretrain.tasks import Chunk
from foretrain.trace import Span, Timeline
from foretrain.units import Time

LANE = "network"
"""The timeline's lane for collectives on a topology."""


class Operations:
    """First in, first out; each takes θ and what the fluid simulation says of it alone.

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
        """Sends ``chunk`` behind all that were started before."""
        start = max(self._free, world.now())
        self._free = start + self._where.overhead + self._where.duration(chunk.op, chunk.size)
        if self._timeline is not None:
            name, step = self._label(chunk)
            self._timeline.add(Span(LANE, "communication", name, step, start, self._free, chunk.size))
        world.schedule(self._free, ARRIVAL, done, chunk)
