"""HDRM: halving-doubling with rank mapping, which puts one flow on each direct link of a BiGraph in every round.

A BiGraph (EFLOPS, HPCA'20) has ``switches`` N, half of them upper and half lower, H each; every upper switch has one
cable to every lower one, and each switch has ``hosts`` M. Hosts are numbered by part, switch, port:

    host = (part · H + switch) · M + port
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretrain.collective.circulant import Circle, circle, exchange, halvings
from foretrain.collective.composition import copies, in_turn, part_of, together
from foretrain.collective.plan import Operation, Plan, rounds
from foretrain.errors import ConfigError

# Note [HDRM for any number of hosts]
# The paper maps N·M ranks, both powers of two. Elsewhere there are two levels, none of which uses a link twice.
#
# Inside each switch its hosts reduce-scatter the data into k shards; no link between switches is used. Then each shard
# is all-reduced across the 2h switches in use, by a product of circles in which every round flips the part: circles of
# two, and one of 2m ranks with m odd that skips by odd numbers only. In each round the upper switches so send to the
# lower ones by a bijection, and conversely. All k shards do this at once, shard j with the upper switches turned by j:
#
#     upper switch of shard j = (i + j) mod h        lower switch = i
#
# For one link (u, l) the flows of shard j and j' in a round would need the same bijection at u − j and u − j', hence
# j = j' mod h. So there are at most ⌈k/h⌉ flows on a link direction: one if k ≤ h, and that is the least possible where
# ranks sit on more than one switch. If k > h, it is the least for rounds in which all k hosts of a switch send at once.
#
# Where the ranks do not fill the switches evenly, some have k and some k − 1 hosts. Each switch still gives its hosts
# equal parts; shards are then what lies between any two edges of parts, and shard j is turned by the number of the k-th
# part that it is in. A k-th part has at most two shards, so that at most two flows share a link, which together carry
# what one does elsewhere. With one flow a link (``balanced`` false) k shards are whole, and one host of a switch of
# k − 1 has two of them: its port is then the bottleneck, and a step takes up to 1.9 times as long.
# Rounds are paced, as one that runs ahead would meet the flows of another on its links.


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
        """Return the number of each rank's host, int64 (ranks,): what to place a plan's ranks on."""
        return (self.part * (self.switches // 2) + self.switch) * self.hosts + self.port


def flows_on_links(seats: Seats, source: NDArray[np.integer], target: NDArray[np.integer]) -> NDArray[np.int64]:
    """Count the flows from ``source`` to ``target`` ranks on each link: int64 (part sent from, upper, lower).

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
    """Add one to ``count``, of shape (upper, lower), for each pair."""
    half = len(count)
    count += np.bincount(upper * half + lower, minlength=half * half).reshape(half, half)


def contention(plan: Plan, seats: Seats) -> list[int]:
    """Return the most flows on one direction of a link between switches, in each round of a plan in lock step.

    Rounds are counted among the transfers that leave their switch; what happens inside switches uses no such link.
    """
    switch = seats.part * seats.switches + seats.switch
    outside = part_of(plan, switch[plan.source] != switch[plan.target])
    return [
        int(flows_on_links(seats, outside.source[under_way], outside.target[under_way]).max())
        for under_way in rounds(outside)
    ]


@dataclass(frozen=True, slots=True)
class _Layout:
    """Switches in use and the number of ranks at each.

    Attributes:
        half: h, switches of each part that are used.
        ranks: of each of the 2h switches, upper ones first.
    """

    half: int
    ranks: tuple[int, ...]

    @property
    def shards(self) -> int:
        return max(self.ranks)

    @property
    def flows(self) -> int:
        """Return the flows on one direction of a link in a round."""
        return -(-self.shards // self.half)

    @property
    def rounds(self) -> int:
        return len(circle(self.shards).rounds) + sum(len(one.rounds) for one in _crossing(self.half))

    @property
    def cost(self) -> float:
        """Return the time of the reduce-scatter in units of S/B, if rounds are in lock step: in switches, then across
        links."""
        busiest = max(self.flows / self.shards, 1 / min(self.ranks))
        return (self.shards - 1) / self.shards + busiest * (1 - 1 / (2 * self.half))


def hdrm(operation: Operation, ranks: int, *, switches: int, hosts: int, balanced: bool = True) -> Plan:
    """Build an all-reduce for a BiGraph (EFLOPS, HPCA'20); place its ranks on the hosts that `hdrm_mapping` names.

    The paper's, halving-doubling with near partners first, where the ranks are 2h·m with powers of two and m ≤ h. The
    generalisation to every number of ranks is ours: see Note [HDRM for any number of hosts].
    It has at most one flow per link direction in a round wherever a switch has no more hosts than links, or two that
    carry as much as one where the switches in use have not equally many ranks. Bytes are the least possible,
    2(P − 1)/P · S, where they have, and a few per cent more elsewhere.
    Ranks that fit under one switch stay there; an odd number of ranks below N sit on a switch each, in one circle.

    Args:
        operation: all_reduce, reduce_scatter or all_gather.
        ranks: P, from 2 to switches · hosts.
        switches: N, even.
        hosts: M, per switch.
        balanced: whether the ranks of a switch share the data evenly, whatever other switches have; else there is one
            flow per link direction everywhere, at the price of more bytes.

    Raises:
        ConfigError: the switches are odd, or the ranks too many.
    """
    _check(ranks, switches, hosts)
    if ranks <= hosts or _published(ranks, switches, hosts) or (ranks < switches and ranks % 2):
        return exchange("hdrm", operation, halvings(ranks), paced=True)
    return _two_levels(operation, ranks, _layout(ranks, switches, hosts), balanced)


def hdrm_mapping(switches: int, hosts: int, ranks: int | None = None) -> Seats:
    """Return the seat of each rank for `hdrm`; by default there are as many ranks as hosts."""
    ranks = switches * hosts if ranks is None else ranks
    _check(ranks, switches, hosts)
    rank = np.arange(ranks)
    if ranks <= hosts:
        return Seats(switches, hosts, 0 * rank, 0 * rank, rank)
    if half := _published(ranks, switches, hosts):
        parity = np.array([one.bit_count() & 1 for one in range(ranks)])
        turn, place = rank // (2 * half), rank % (2 * half) // 2
        return Seats(switches, hosts, parity, np.where(parity == 0, (place + turn) % half, place), turn)
    if ranks < switches and ranks % 2:
        return Seats(switches, hosts, rank % 2, rank // 2, 0 * rank)
    layout = _layout(ranks, switches, hosts)
    switch = np.repeat(np.arange(2 * layout.half), layout.ranks)
    port = rank - np.repeat(_starts(layout)[:-1], layout.ranks)
    return Seats(switches, hosts, switch // layout.half, switch % layout.half, port)


def _check(ranks: int, switches: int, hosts: int) -> None:
    if switches < 2 or switches % 2:
        raise ConfigError("switches", switches, "cannot be halved into upper and lower", "write an even number")
    if hosts < 1:
        raise ConfigError("hosts", hosts, "leaves the switches without hosts", "write at least 1")
    if not 2 <= ranks <= switches * hosts:
        raise ConfigError(
            "ranks", ranks, f"are not 2 to {switches * hosts} on {switches} switches of {hosts} hosts", "change one"
        )


def _published(ranks: int, switches: int, hosts: int) -> int:
    """Return h of the paper's mapping on 2h of the switches; 0 where it does not apply."""
    half = min(1 << ((switches // 2).bit_length() - 1), ranks // 2)
    fits = ranks & (ranks - 1) == 0 and ranks <= 2 * half * min(hosts, half)
    return half if fits else 0


def _layout(ranks: int, switches: int, hosts: int) -> _Layout:
    """Return the layout with the fewest flows on a link, and of these the one whose busiest link moves least."""
    fitting = []
    for half in range(1, switches // 2 + 1):
        each, more = divmod(ranks, 2 * half)
        if each and each + (more > 0) <= hosts:
            # Upper and lower switches take turns in having one rank more.
            order = np.argsort(np.arange(2 * half) % half * 2 + np.arange(2 * half) // half)
            counts = np.full(2 * half, each)
            counts[order[:more]] += 1
            fitting.append(_Layout(half, tuple(counts.tolist())))
    return min(fitting, key=lambda layout: (layout.flows, round(layout.cost, 9), layout.rounds))


def _starts(layout: _Layout) -> NDArray[np.int64]:
    return np.cumsum([0, *layout.ranks])


def _crossing(half: int) -> list[Circle]:
    """Return circles of 2 · half switches in which every round goes from one part to the other."""
    twos = (half & -half).bit_length() - 1
    return [circle(2)] * twos + [circle(2 * (half >> twos), odd=True)]


def _two_levels(operation: Operation, ranks: int, layout: _Layout, balanced: bool) -> Plan:
    half, starts, counts = layout.half, _starts(layout), np.array(layout.ranks)
    nodes = 2 * half
    # The data in units of which every part of every switch is a whole number.
    units = math.lcm(*layout.ranks) if balanced else layout.shards
    parts = {int(count): np.arange(count + 1) * units // count for count in set(layout.ranks)}
    edges = np.unique(np.concatenate([*parts.values(), parts[layout.shards]]))
    between = exchange("hdrm", operation, _crossing(half), paced=True)
    # The parity of a node is that of its digits' sum: each round changes one digit by an odd number in an even circle.
    parity = _parity(_crossing(half))
    place = np.empty(nodes, np.int64)
    for part in (0, 1):
        place[parity == part] = np.arange(half)
    across, owner = [], []
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        turn = low * layout.shards // units
        switch = np.where(parity == 0, (place + turn) % half, half + place)
        slot = {count: int(np.searchsorted(part, low, "right")) - 1 for count, part in parts.items()}
        holders = starts[switch] + np.array([slot[count] for count in counts[switch].tolist()])
        width = high - low
        across.append(copies(between, holders[None], [low * nodes], np.arange(nodes + 1) * width))
        owner.append(np.repeat(holders[between.owner], width) if operation != "all_reduce" else holders[:0])

    def inside(kind: Operation) -> list[Plan]:
        made = []
        for count, part in sorted(parts.items()):
            if count > 1:
                template = exchange("hdrm", kind, [circle(count)], paced=True)
                members = starts[:-1][counts == count][:, None] + np.arange(count)
                made.append(copies(template, members, np.zeros(len(members), np.int64), part * nodes))
        return [together(made)] if made else []

    before = inside("reduce_scatter") if operation != "all_gather" else []
    later = inside("all_gather") if operation != "reduce_scatter" else []
    stages = [*before, together(across), *later]
    return in_turn("hdrm", operation, ranks, units * nodes, stages, owner=np.concatenate(owner))


def _parity(circles: Sequence[Circle]) -> NDArray[np.int64]:
    """Return the sum of the digits of each node, mod 2; digits as in `exchange` with near partners first."""
    nodes, total, apart = np.arange(math.prod(one.size for one in circles)), 0, 1
    for one in circles:
        total, apart = total + nodes // apart % one.size, apart * one.size
    return np.asarray(total % 2)
