"""Packets that take all their ways in turn: which ways, and what switches see of them."""

from __future__ import annotations

import numpy as np
import pytest

from foretrain.collective import build
from foretrain.network.deployment import Deployment
from foretrain.network.deployment_notation import topology
from foretrain.network.fabrics.clos import fat_tree, leaf_spine
from foretrain.network.fidelity import Fidelity
from foretrain.network.packet import Packets
from foretrain.network.packet import state as c
from foretrain.network.program import Program, joined, place
from foretrain.network.routing import Ecmp, Scatter

RATE = 12.5e9


def ways(network, source, target, connection=0):
    """All ways of one flow, as lists of links."""
    route = Scatter(network, seed=3)
    ends = [np.array([each], np.int32) for each in (network.ranks[source], network.ranks[target], connection)]
    return [paths.of(0).tolist() for paths in (route.paths(*ends), *route.others(*ends))]


@pytest.mark.parametrize(
    ("network", "pair", "count"),
    [
        (leaf_spine(3, 2, RATE, spines=4), (0, 5), 4),
        (leaf_spine(3, 2, RATE, spines=4), (0, 1), 1),
        (fat_tree(4, RATE), (0, 15), 4),
        (fat_tree(8, RATE), (0, 127), 16),
        (fat_tree(8, RATE), (0, 5), 4),
        (leaf_spine(2, 2, RATE, spines=64), (0, 3), 64),
    ],
)
def test_every_way_is_found_once(network, pair, count):
    found = ways(network, *pair)
    assert len(found) == len({tuple(way) for way in found}) == count
    assert len({len(way) for way in found}) == 1


def test_the_first_way_is_that_of_ecmp():
    network = fat_tree(4, RATE)
    ends = [network.ranks[[0, 3, 9]], network.ranks[[15, 8, 1]], np.array([0, 1, 2], np.int32)]
    ours, theirs = Scatter(network, seed=3).paths(*ends), Ecmp(network, seed=3).paths(*ends)
    np.testing.assert_array_equal(ours.links, theirs.links)


def test_flows_with_fewer_ways_take_them_more_often():
    network = leaf_spine(2, 2, RATE, spines=4)
    program = place(build("ring", "all_reduce", 4), 4e5, Scatter(network))
    assert len(program.others) == 3
    within = next(f for f in range(len(program)) if len(program.paths.of(f)) == 2)
    assert all(paths.of(within).tolist() == program.paths.of(within).tolist() for paths in program.others)
    alone = Program.of(program.paths, program.size)
    both = joined([alone, program])
    assert len(both.others) == 3
    assert both.others[2].of(0).tolist() == alone.paths.of(0).tolist()
    assert both.others[2].of(len(alone) + 1).tolist() == program.others[2].of(1).tolist()


def test_every_spine_carries_its_share():
    network = leaf_spine(2, 1, RATE, spines=4)
    program = place(build("ring", "all_gather", 2), 2 * 1460 * 400, Scatter(network))
    outcome = Packets(network).run(program)
    up = np.flatnonzero((network.source == network.node("leaf0")) & ~np.isin(network.target, network.ranks))
    sent = outcome.counts[up][:, :, c.BYTES_OUT].sum(axis=1)
    data = outcome.sent[0] * 1538 / 4
    # Data in turn; answers to the other direction's data take one way.
    assert sorted(sent)[:3] == pytest.approx([data] * 3, rel=0.02)


def test_packets_of_a_deployment_take_the_ways_that_there_are():
    sprayed = Deployment(topology("leaf_spine:2x4@100Gbps"), "ring", routing="spray")
    packets = sprayed.simulated(Fidelity("packet"))
    assert sprayed.network.links < packets.network.links == sprayed.topology.links
    program = packets.program("all_reduce", 1 << 16)
    assert program.others
    assert not sprayed.program("all_reduce", 1 << 16).others
    # Choices of an algorithm are the fluid's.
    chosen = Deployment(topology("leaf_spine:2x4@100Gbps"), "auto", routing="spray")
    assert chosen.simulated(Fidelity("packet")).collective_at(1 << 20) == chosen.collective_at(1 << 20)
