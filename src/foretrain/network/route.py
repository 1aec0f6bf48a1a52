"""The path of a chunk as a pipeline of hops: what a world needs to know of a network to carry one chunk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from foretrain.tasks import Op
from foretrain.units import Time, moving


@dataclass(frozen=True, slots=True)
class Hop:
    """One first-in-first-out pipe on the way.

    Attributes:
        pipe: which pipe; hops with the same name queue behind each other.
        cost: time of one byte, in the fixed point of `units.per_byte`.
        overhead: θ, time of one operation whatever its size. It occupies the pipe.
        latency: time from leaving the pipe to arriving. It occupies nothing, so that a window can hide it.
    """

    pipe: str
    cost: int
    overhead: Time = 0
    latency: Time = 0

    def occupancy(self, size: int) -> Time:
        """How long ``size`` bytes keep the pipe busy."""
        return self.overhead + moving(size, self.cost)


Route: TypeAlias = tuple[Hop, ...]


def bottleneck(routes: Mapping[Op, Route]) -> int:
    """κ: the cost of exchanging one byte where it is dearest, over all pipes a full exchange crosses."""
    totals: dict[str, int] = {}
    for hop in routes["all_reduce"]:
        totals[hop.pipe] = totals.get(hop.pipe, 0) + hop.cost
    return max(totals.values())


def overhead(routes: Mapping[Op, Route]) -> Time:
    """θ on the pipe where one exchange pays it most often."""
    totals: dict[str, Time] = {}
    for hop in routes["all_reduce"]:
        totals[hop.pipe] = totals.get(hop.pipe, 0) + hop.overhead
    return max(totals.values())


def latency(routes: Mapping[Op, Route]) -> Time:
    """The latency of one whole exchange."""
    return sum(hop.latency for hop in routes["all_reduce"])
