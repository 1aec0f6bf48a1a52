import numpy as np
import pytest

from foretrain.collective.plan import Draft
from foretrain.errors import ConfigError
from foretrain.network.program import place
from foretrain.network.routing import Ecmp, Spray, link_load
from foretrain.network.topology.graph import Builder
from tests.network.routing.networks import all_pairs, check_paths, fat_tree, leaf_spine, server


def test_a_bundle_carries_what_its_links_carry_on_average_under_ecmp():
    topology = leaf_spine(leaves=4, spines=4, hosts=4)
    flows = all_pairs(topology)
    spray = Spray(topology)
    bundle = link_load(spray.paths(*all_pairs(spray.topology)), spray.topology)
    expected = 4 * 12
    for leaf in range(4):
        assert bundle[spray.topology.between(f"leaf{leaf}", "spine")] == expected
        assert bundle[spray.topology.between("spine", f"leaf{leaf}")] == expected
    seeds = 400
    ecmp = sum(link_load(Ecmp(topology, seed=seed).paths(*flows), topology) for seed in range(seeds)) / seeds
    for leaf in range(4):
        each = [ecmp[topology.between(f"leaf{leaf}", f"spine{spine}")][0] for spine in range(4)]
        assert sum(each) == pytest.approx(expected)
        # A link has 48 flows with chance 1/4 each: 3 on either side of the mean for one seed, a twentieth for all.
        assert np.abs(np.array(each) - expected / 4).max() < 5 * 3 / seeds**0.5


def test_all_bundles_of_a_tier_carry_the_same():
    spray = Spray(fat_tree(8))
    topology = spray.topology
    flows = all_pairs(topology)
    paths = spray.paths(*flows)
    check_paths(topology, paths, *flows[:2])
    tier = np.array([node.tier for node in topology.nodes])
    load = link_load(paths, topology)
    for below in range(3):
        assert len(np.unique(load[(tier[topology.source] == below) & (tier[topology.target] == below + 1)])) == 1


def test_flows_of_a_pair_go_the_same_way_whatever_the_seed():
    one, other = (Spray(fat_tree(4), seed=seed) for seed in (0, 1))
    flows = all_pairs(one.topology, connections=2)
    assert np.array_equal(one.paths(*flows).links, other.paths(*flows).links)


def test_where_nothing_can_be_bundled_the_remedy_is_named():
    topology = leaf_spine(leaves=2, spines=2, bundle=False)
    uneven = topology.changed(topology.between("leaf0", "spine0"), rate=1e9)
    with pytest.raises(
        ConfigError, match=r"nothing to bundle in .* 32 flows .* same bundle, or use 'adaptive' or 'ecmp'"
    ):
        Spray(uneven).paths(*all_pairs(uneven))
    single = leaf_spine(spines=1)
    assert len(Spray(single).paths(*all_pairs(single)))
    with pytest.raises(ConfigError, match="nothing to bundle"):
        Spray(server()).paths(*all_pairs(server()))


def test_ways_that_cannot_be_bundled_are_chosen_by_connection():
    """A host with two NICs on two leaves that share their spines."""
    build = Builder("two NICs")
    hosts = [build.node(f"h{i}", "host") for i in range(2)]
    spines = [build.node(f"spine{i}", "switch", bundle="spine") for i in range(4)]
    for host in range(2):
        for i in range(2):
            nic = build.node(f"h{host}.nic{i}", "nic")
            leaf = build.node(f"h{host}.leaf{i}", "switch")
            build.cable(hosts[host], nic, rate=1e9, latency=1)
            build.cable(nic, leaf, rate=1e9, latency=1)
            for spine in spines:
                build.cable(leaf, spine, rate=1e9, latency=1)
    spray = Spray(build.topology(hosts))
    count = 40
    flows = [np.full(count, spray.topology.ranks[i], np.int32) for i in range(2)]
    load = link_load(spray.paths(*flows, np.arange(count, dtype=np.int32)), spray.topology)
    used = [load[spray.topology.between("h0", f"h0.nic{i}")][0] for i in range(2)]
    assert sum(used) == count
    assert min(used) > count / 8


def test_a_plan_is_placed_on_the_bundles():
    topology = leaf_spine(leaves=2, spines=4, hosts=2)
    draft = Draft("shift", "all_to_all", 4, 4)
    for rank in range(4):
        draft.transfer(rank, (rank + 2) % 4, rank)
    program = place(draft.plan(), 1e6, Spray(topology))
    assert len(program) == 4
    assert {len(program.paths.of(i)) for i in range(4)} == {4}


def test_other_nodes_are_another_fabric():
    with pytest.raises(ConfigError, match="is not the one that is sprayed over"):
        Spray(fat_tree(4)).on(fat_tree(8))
