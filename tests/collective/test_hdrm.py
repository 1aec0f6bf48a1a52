"""HDRM on BiGraphs: one flow per link direction in a round, for powers of two and for everything else."""

from collections.abc import Iterator

import numpy as np
import pytest

from foretrain.collective import build, contention, flows_on_links, hdrm_mapping, steps_on_critical_path, verify
from foretrain.collective.circulant import circle

POWERS = [(2, 1), (4, 2), (8, 4), (16, 8), (32, 16), (8, 2), (16, 4), (32, 8)]


@pytest.mark.parametrize(("switches", "hosts"), POWERS)
def test_powers_of_two_are_mapped_as_published(switches, hosts):
    ranks, half = switches * hosts, switches // 2
    seats = hdrm_mapping(switches, hosts)
    assert sorted(seats.host.tolist()) == list(range(ranks))
    for rank in range(ranks):
        turn, place = rank // switches, rank % switches // 2
        part = rank.bit_count() % 2
        assert (seats.part[rank], seats.port[rank]) == (part, turn)
        assert seats.switch[rank] == (place if part else (place + turn) % half)


@pytest.mark.parametrize(("switches", "hosts"), POWERS)
def test_every_exchange_of_powers_of_two_crosses_one_link_and_shares_it_with_nobody(switches, hosts):
    ranks, half = switches * hosts, switches // 2
    seats, everyone = hdrm_mapping(switches, hosts), np.arange(ranks)
    for bit in range(ranks.bit_length() - 1):
        partner = everyone ^ (1 << bit)
        assert (seats.part[partner] != seats.part).all()
        flows = flows_on_links(seats, everyone, partner)
        assert flows.max() <= 1
        assert flows.sum() == ranks
        if hosts == half:
            assert flows.min() == 1
    plan = build("hdrm", "all_reduce", ranks, switches=switches, hosts=hosts)
    assert contention(plan, seats) == [1] * (2 * (ranks.bit_length() - 1))
    assert steps_on_critical_path(plan) == 2 * (ranks.bit_length() - 1)
    assert plan.sent(1.0) == pytest.approx(np.full(ranks, 2 * (ranks - 1) / ranks))


@pytest.mark.parametrize(("switches", "hosts"), [(4, 2), (8, 4), (16, 8)])
def test_the_identity_puts_many_flows_on_a_link(switches, hosts):
    ranks = switches * hosts
    plan = build("halving_doubling", "all_reduce", ranks)
    everyone = np.arange(ranks)
    seats = hdrm_mapping(switches, hosts)
    switch = everyone // hosts
    plain = type(seats)(switches, hosts, switch // (switches // 2), switch % (switches // 2), everyone % hosts)
    assert max(contention(plan, plain)) >= hosts


def fabrics() -> Iterator[tuple[int, int, int]]:
    """Small fabrics with few ranks, one switch's, half of them, and all or nearly all."""
    for switches in (2, 4, 6, 8, 12, 14):
        for hosts in range(1, 8):
            seats = switches * hosts
            chosen = {2, 3, 5, hosts, hosts + 1, 2 * hosts + 1, seats // 2, seats // 2 + 3, seats - 1, seats}
            yield from ((switches, hosts, ranks) for ranks in sorted(chosen) if 2 <= ranks <= seats)


def test_any_number_of_ranks_on_any_fabric_shares_links_as_little_as_possible():
    for switches, hosts, ranks in fabrics():
        seats = hdrm_mapping(switches, hosts, ranks)
        assert len(set(seats.host.tolist())) == ranks
        assert 0 <= seats.host.min() <= seats.host.max() < switches * hosts
        plan = build("hdrm", "all_reduce", ranks, switches=switches, hosts=hosts, balanced=False)
        most = max(contention(plan, seats), default=0)
        if ranks <= hosts:
            assert most == 0
        elif hosts <= switches // 2:
            assert most == 1, (switches, hosts, ranks)
        else:
            # The hosts of the fullest switch send over one link per switch of the other part.
            assert most <= -(-hosts // (switches // 2)), (switches, hosts, ranks)
        fullest = np.bincount(seats.part * switches + seats.switch).max()
        used = [len(set(seats.switch[seats.part == part].tolist())) for part in (0, 1)]
        if most > 1:
            assert most == -(-fullest // min(used))
        balanced = build("hdrm", "all_reduce", ranks, switches=switches, hosts=hosts)
        assert max(contention(balanced, seats), default=0) <= 2 * most


def test_bytes_and_rounds_are_near_the_bounds():
    for switches, hosts, ranks in fabrics():
        plan = build("hdrm", "all_reduce", ranks, switches=switches, hosts=hosts)
        ratio = plan.sent(1.0).max() / (2 * (ranks - 1) / ranks)
        assert 1 - 1e-12 <= ratio <= 1.13
        whole = build("hdrm", "all_reduce", ranks, switches=switches, hosts=hosts, balanced=False)
        assert whole.sent(1.0).max() / (2 * (ranks - 1) / ranks) <= 1.25
        if ranks == switches * hosts:  # a full fabric
            assert ratio == pytest.approx(1)
            least = 2 * sum(len(circle(size).rounds) for size in (switches, hosts))
            assert steps_on_critical_path(plan) <= least + 2


@pytest.mark.parametrize(("switches", "hosts", "ranks"), [(4, 3, 12), (6, 3, 18), (6, 2, 11), (8, 3, 23), (12, 2, 21)])
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("balanced", [True, False])
def test_every_generalisation_ends_with_the_sum(switches, hosts, ranks, operation, balanced):
    verify(build("hdrm", operation, ranks, switches=switches, hosts=hosts, balanced=balanced))


def steps_of(ranks: int) -> list[list[tuple[int, int]]]:
    """The rounds of halving-doubling as (sender, receiver); the way back has the same links in the other direction."""
    plan = build("halving_doubling", "reduce_scatter", ranks)
    rows = np.stack([plan.source, plan.target], axis=1).reshape(-1, ranks, 2)
    return [[tuple(pair) for pair in row.tolist()] for row in rows]


def least_contention(switches: int, hosts: int, ranks: int) -> int | None:
    """By exhaustive search over all mappings of plain halving-doubling, up to symmetry; None where none is direct.

    Every exchange has to stay inside a switch or cross one link.
    """
    rounds = steps_of(ranks)
    for limit in range(0, hosts + 1):
        if _mappable(switches, hosts, ranks, rounds, limit):
            return limit
    return None


def _mappable(switches: int, hosts: int, ranks: int, rounds: list[list[tuple[int, int]]], limit: int) -> bool:
    half = switches // 2
    seat: list[int] = []
    load: dict[tuple[int, int, int], int] = {}
    # What becomes known when the later of two ranks is seated.
    known = [[(t, a, b) for t, row in enumerate(rounds) for a, b in row if max(a, b) == rank] for rank in range(ranks)]

    def fits(rank: int) -> bool:
        if rank == ranks:
            return True
        used = set(seat)
        fresh: set[int] = set()
        for switch in range(switches):
            part = switch // half
            if switch not in used:
                # Empty switches of a part are alike, and so are the parts themselves at first.
                if part in fresh or (part == 1 and not used):
                    continue
                fresh.add(part)
            if seat.count(switch) == hosts:
                continue
            seat.append(switch)
            added, good = [], True
            for step, a, b in known[rank]:
                if seat[a] != seat[b]:
                    key = (step, seat[a], seat[b])
                    if seat[a] // half == seat[b] // half or load.get(key, 0) == limit:
                        good = False
                        break
                    load[key] = load.get(key, 0) + 1
                    added.append(key)
            if good and fits(rank + 1):
                return True
            for key in added:
                load[key] -= 1
            seat.pop()
        return False

    return fits(0)


# fmt: off
SEARCHED = {
    (2, 1, 2): (1, 1),
    (2, 2, 3): (1, 2), (2, 2, 4): (2, 2),
    (2, 3, 4): (1, 2), (2, 3, 5): (2, 3), (2, 3, 6): (2, 3),
    (2, 4, 5): (1, 3), (2, 4, 6): (2, 3), (2, 4, 7): (2, 4), (2, 4, 8): (2, 4),
    (2, 6, 7): (1, 4), (2, 6, 8): (2, 4), (2, 6, 9): (3, 5), (2, 6, 10): (3, 5), (2, 6, 11): (3, 6), (2, 6, 12): (3,
    6),
    (4, 1, 2): (1, 1), (4, 1, 3): (None, 1), (4, 1, 4): (1, 1),
    (4, 2, 3): (1, 1), (4, 2, 4): (1, 1), (4, 2, 5): (None, 1), (4, 2, 6): (2, 1), (4, 2, 7): (None, 1), (4, 2, 8):
    (1, 1),
    (4, 3, 4): (1, 1), (4, 3, 5): (2, 1), (4, 3, 6): (2, 1), (4, 3, 7): (None, 1), (4, 3, 8): (1, 1), (4, 3, 9):
    (None, 2), (4, 3, 10): (3, 2), (4, 3, 11): (None, 2), (4, 3, 12): (2, 2),
    (4, 4, 5): (1, 1), (4, 4, 6): (1, 1), (4, 4, 7): (2, 1), (4, 4, 8): (1, 1), (4, 4, 9): (None, 2), (4, 4, 10):
    (3, 2), (4, 4, 11): (None, 2), (4, 4, 12): (2, 2),
    (6, 1, 2): (1, 1), (6, 1, 3): (None, 1), (6, 1, 4): (1, 1), (6, 1, 5): (None, 1), (6, 1, 6): (None, 1),
    (6, 2, 3): (1, 1), (6, 2, 4): (1, 1), (6, 2, 5): (None, 1), (6, 2, 6): (2, 1), (6, 2, 7): (None, 1), (6, 2, 8):
    (1, 1), (6, 2, 9): (None, 1), (6, 2, 10): (None, 1), (6, 2, 11): (None, 1), (6, 2, 12): (2, 1),
    (6, 3, 4): (1, 1), (6, 3, 5): (2, 1), (6, 3, 6): (2, 1), (6, 3, 7): (None, 1), (6, 3, 8): (1, 1), (6, 3, 9):
    (None, 1), (6, 3, 10): (3, 1), (6, 3, 11): (None, 1), (6, 3, 12): (2, 1),
    (6, 4, 5): (1, 1), (6, 4, 6): (1, 1), (6, 4, 7): (2, 1), (6, 4, 8): (1, 1), (6, 4, 9): (None, 1), (6, 4, 10):
    (3, 1), (6, 4, 11): (None, 1), (6, 4, 12): (2, 1),
    (8, 1, 2): (1, 1), (8, 1, 3): (None, 1), (8, 1, 4): (1, 1), (8, 1, 5): (None, 1), (8, 1, 6): (None, 1), (8, 1,
    7): (None, 1), (8, 1, 8): (1, 1),
    (8, 2, 3): (1, 1), (8, 2, 4): (1, 1), (8, 2, 5): (None, 1), (8, 2, 6): (2, 1), (8, 2, 7): (None, 1), (8, 2, 8):
    (1, 1), (8, 2, 9): (None, 1), (8, 2, 10): (None, 1), (8, 2, 11): (None, 1), (8, 2, 12): (2, 1),
    (8, 3, 4): (1, 1), (8, 3, 5): (2, 1), (8, 3, 6): (2, 1), (8, 3, 7): (None, 1), (8, 3, 8): (1, 1), (8, 3, 9):
    (None, 1), (8, 3, 10): (3, 1), (8, 3, 11): (None, 1), (8, 3, 12): (2, 1),
    (8, 4, 5): (1, 1), (8, 4, 6): (1, 1), (8, 4, 7): (2, 1), (8, 4, 8): (1, 1), (8, 4, 9): (None, 1), (8, 4, 10):
    (3, 1), (8, 4, 11): (None, 1), (8, 4, 12): (2, 1),
    (12, 1, 2): (1, 1), (12, 1, 3): (None, 1), (12, 1, 4): (1, 1), (12, 1, 5): (None, 1), (12, 1, 6): (None, 1),
    (12, 1, 7): (None, 1), (12, 1, 8): (1, 1), (12, 1, 9): (None, 1), (12, 1, 10): (None, 1), (12, 1, 11): (None,
    1), (12, 1, 12): (None, 1),
}
# fmt: on
"""Fabric and ranks: the least contention of any mapping of plain halving-doubling, and ours."""


@pytest.mark.parametrize(("fabric", "expected"), SEARCHED.items())
def test_what_mappings_of_plain_halving_doubling_can_do(fabric, expected):
    switches, hosts, ranks = fabric
    if expected[0] is not None and hosts <= switches // 2:
        assert expected[1] <= expected[0]
    plan = build("hdrm", "all_reduce", ranks, switches=switches, hosts=hosts, balanced=False)
    ours = max(contention(plan, hdrm_mapping(switches, hosts, ranks)), default=0)
    assert (least_contention(switches, hosts, ranks), ours) == expected


@pytest.mark.parametrize(("switches", "hosts"), [(2, 2), (2, 6), (4, 3), (6, 5), (8, 8), (12, 6), (14, 9)])
def test_the_busiest_link_moves_what_the_switches_behind_it_have_to(switches, hosts):
    ranks, half = switches * hosts, switches // 2
    plan = build("hdrm", "all_reduce", ranks, switches=switches, hosts=hosts)
    seats = hdrm_mapping(switches, hosts)
    switch = seats.part * half + seats.switch
    sent = plan.size(1.0) * plan.steps
    left = np.bincount(switch[plan.source], np.where(switch[plan.source] != switch[plan.target], sent, 0.0))
    if hosts & (hosts - 1) or switches & (switches - 1) or hosts > half:
        assert left == pytest.approx(np.full(switches, 2 * (1 - 1 / switches)))
