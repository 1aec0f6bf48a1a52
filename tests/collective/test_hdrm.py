"""HDRM on BiGraphs: one flow per link direction in a round, for powers of two and for everything else."""

from collections.abc import Iterator

import numpy as np
import pytest

from foretrain.collective import Seats, build, contention, flows_on_links, hdrm_mapping, steps_on_critical_path, verify
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
    everyone, half = np.arange(switches * hosts), switches // 2
    switch = everyone // hosts
    plain = Seats(switches, hosts, switch // half, switch % half, everyone % hosts)
    assert max(contention(build("halving_doubling", "all_reduce", len(everyone)), plain)) >= hosts


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
        # Bytes and rounds are near the bounds.
        least = 2 * (ranks - 1) / ranks
        assert plan.sent(1.0).max() / least <= 1.25
        assert 1 - 1e-12 <= balanced.sent(1.0).max() / least <= 1.13
        if ranks == switches * hosts:  # a full fabric
            assert balanced.sent(1.0).max() == pytest.approx(least)
            steps = 2 * sum(len(circle(size).rounds) for size in (switches, hosts))
            assert steps_on_critical_path(balanced) <= steps + 2


@pytest.mark.parametrize(("switches", "hosts", "ranks"), [(4, 3, 12), (6, 3, 18), (6, 2, 11), (8, 3, 23), (12, 2, 21)])
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("balanced", [True, False])
def test_every_generalisation_ends_with_the_sum(switches, hosts, ranks, operation, balanced):
    verify(build("hdrm", operation, ranks, switches=switches, hosts=hosts, balanced=balanced))


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
