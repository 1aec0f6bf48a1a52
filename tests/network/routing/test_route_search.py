import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.network.routing.route_search import Ways
from tests.network.routing.networks import all_pairs, fat_tree, leaf_spine, random_network, server


def same(one, other):
    return np.array_equal(one.paths.first, other.paths.first) and np.array_equal(one.paths.links, other.paths.links)


def from_both_ends_as_from_one(topology, ball):
    flows = all_pairs(topology, connections=2)
    whole = dataclasses.replace(Ways.of(topology), pairs=0)
    bounded = dataclasses.replace(whole, ball=ball, pairs=len(flows[0]))
    assert same(whole.by_hop(*flows, spread=True), bounded.by_hop(*flows, spread=True))
    sizes = np.ones(len(flows[0]))
    load = np.zeros((2, topology.links))
    assert same(whole.by_load(*flows[:2], sizes, load[0]), bounded.by_load(*flows[:2], sizes, load[1]))
    assert np.array_equal(load[0], load[1])


@given(st.integers(0, 10**6), st.sampled_from([1, 3]), st.sampled_from([1, 2, 4, 8, 100]))
def test_a_search_from_both_ends_finds_what_a_whole_one_finds(seed, metrics, ball):
    from_both_ends_as_from_one(random_network(seed, metrics=metrics), ball)


@pytest.mark.parametrize("ball", [1, 3, 6, 12, 25, 1000])
@pytest.mark.parametrize("make", [fat_tree, server, lambda: leaf_spine(cables=2)])
def test_so_it_does_in_fabrics(make, ball):
    from_both_ends_as_from_one(make(), ball)


def test_either_search_says_who_cannot_be_reached():
    topology = leaf_spine(leaves=2, spines=2, hosts=2)
    up = topology.up.copy()
    up[topology.target == topology.node("h3")] = False
    ways = Ways.of(dataclasses.replace(topology, up=up))
    flows = all_pairs(topology)
    for pairs in (0, 99):
        found = dataclasses.replace(ways, pairs=pairs).by_hop(*flows, spread=True)
        assert found.lost.tolist() == np.flatnonzero(flows[1] == topology.node("h3")).tolist()


def test_hosts_of_a_switch_share_a_search_and_gpus_with_two_links_do_not():
    topology = leaf_spine(leaves=2, hosts=3)
    anchors = [topology.nodes[node].name for node in Ways.of(topology).anchor[topology.ranks]]
    assert anchors == ["leaf0"] * 3 + ["leaf1"] * 3
    gpus = server()
    assert np.array_equal(Ways.of(gpus).anchor[gpus.ranks], gpus.ranks)
    one_left = gpus.changed(gpus.between("s0.nvswitch", "s0.gpu0"), up=False)
    assert one_left.nodes[Ways.of(one_left).anchor[one_left.ranks[0]]].name == "s0.pcie0"
