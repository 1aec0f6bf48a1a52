"""Where ranks sit on a BiGraph, and how many flows then share its links.

A BiGraph (EFLOPS, HPCA'20) has ``switches`` N, half of them upper and half lower, H each; every upper switch has one
cable to every lower one, and each switch has ``hosts`` M. Hosts are numbered by part, switch, port:

    host = (part · H + switch) · M + port
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretrain.collective.composition import part_of
from foretrain.collective.plan import Plan
from foretrain.collective.progress import rounds


@dataclass(frozen=True, slots=True, eq=False)
class Seats:
    """The host of each rank; columns are int64 (ranks,).

    Attributes:
        switches: N.
        hosts: M, per switch.
        part: 0 upper, 1 lower.
        switch: index in its part, from 0 to H − 1.
        port: from 0 to M − 1.
    """

    switches: int
    hosts: int
    part: NDArray[np.int64]
    switch: NDArray[np.int64]
    port: NDArray[np.int64]

    @property
    def host(self) -> NDArray[np.int64]:
        """The number of each rank's host, int64 (ranks,): what to place a plan's ranks on."""
        return (self.part * (self.switches // 2) + self.switch) * self.hosts + self.port


def flows_on_links(seats: Seats, source: NDArray[np.integer], target: NDArray[np.integer]) -> NDArray[np.int64]:
    """How many of the flows from ``source`` to ``target`` ranks cross each link: int64 (part sent from, upper, lower).

    Between parts there is one link. Between switches of one part there are H ways over a switch of the other part: the
    last one is taken, which `hdrm` leaves free for it. Inside a switch no link is crossed.
    """
    half = seats.switches // 2
    count = np.zeros((2, half, half), np.int64)
    here, there = seats.part[source], seats.part[target]
    leaves, enters = seats.switch[source], seats.switch[target]
    detour = (here == there) & (leaves != enters)
    for start, flows in ((0, here == 0), (1, here == 1)):
        across = flows & (here != there)
        upper, lower = (leaves, enters) if start == 0 else (enters, leaves)
        _tally(count[start], upper[across], lower[across])
        last = np.full(int((flows & detour).sum()), half - 1)
        for end, way in ((leaves[flows & detour], start), (enters[flows & detour], 1 - start)):
            _tally(count[way], *((end, last) if start == 0 else (last, end)))
    return count


def _tally(count: NDArray[np.int64], upper: NDArray[np.int64], lower: NDArray[np.int64]) -> None:
    """Adds one to ``count``, of shape (upper, lower), for each pair."""
    half = len(count)
    count += np.bincount(upper * half + lower, minlength=half * half).reshape(half, half)


def contention(plan: Plan, seats: Seats) -> list[int]:
    """The most flows on one direction of a link between switches, in each round of a plan in lock step.

    Rounds are counted among the transfers that leave their switch; what happens inside switches uses no such link.
    """
    switch = seats.part * seats.switches + seats.switch
    outside = part_of(plan, switch[plan.source] != switch[plan.target])
    return [
        int(flows_on_links(seats, outside.source[under_way], outside.target[under_way]).max())
        for under_way in rounds(outside)
    ]
