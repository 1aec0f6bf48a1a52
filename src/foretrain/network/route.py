"""The path of a chunk as a pipeline of hops: what a world needs to know of a network to carry one chunk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from foretrain.schedule import CostModel
from foretrain.units import Time, moving


@dataclass(frozen=True, slots=True)
class Hop:
    """One first-in-first-out pipe on the way.

    Attributes:
        pipe: which pipe; hops with the same name queue behind each other.
        cost: time of one byte, in the fixed point of `units.per_byte`.
        overhead: θ, time of one operation whatever its size. It occupies the pipe.
        floor: time that an operation keeps the pipe at least, however small it is. Unlike θ it is hidden behind the
            bytes of larger ones: what small collectives cost over sockets, which must make all their rounds.
        latency: time from leaving the pipe to arriving. It occupies nothing, so that a window can hide it.
    """

    pipe: str
    cost: int
    overhead: Time = 0
    latency: Time = 0
    floor: Time = 0

    def occupancy(self, size: int) -> Time:
        """How long ``size`` bytes keep the pipe busy."""
        return max(self.floor, self.overhead + moving(size, self.cost))


Route: TypeAlias = tuple[Hop, ...]


def cost(route: Route) -> CostModel:
    """What crossing ``route`` costs: κ and θ of the pipe where a byte is dearest, and the delay of all the others."""
    totals: dict[str, tuple[int, Time]] = {}
    for hop in route:
        per_byte, overhead = totals.get(hop.pipe, (0, 0))
        totals[hop.pipe] = (per_byte + hop.cost, overhead + hop.overhead)
    dearest = max(totals, key=totals.__getitem__)
    others = [total for pipe, total in totals.items() if pipe != dearest]
    return CostModel(
        overhead=totals[dearest][1],
        per_byte=totals[dearest][0],
        latency=sum(hop.latency for hop in route) + sum(overhead for _, overhead in others),
        elsewhere=sum(per_byte for per_byte, _ in others),
        floor=sum(hop.floor for hop in route if hop.pipe == dearest),
    )


def served_cost(route: Route) -> CostModel:
    """The same of a parameter server, whose answer comes while more is pushed: its last two hops are push and pull.

    Whichever direction is the dearer sets the pace; an operation is done when the acknowledgement of its push is back.
    Where both directions share a wire, a byte that is pushed while another is pulled takes twice as long.
    """
    *local, push, pull = route
    if push.pipe == pull.pipe:
        pace = replace(push, cost=push.cost + pull.cost, overhead=push.overhead + pull.overhead)
    else:
        pace = max(push, pull, key=lambda hop: (hop.cost, hop.overhead))
    return cost((*local, replace(pace, latency=push.latency + pull.latency)))
