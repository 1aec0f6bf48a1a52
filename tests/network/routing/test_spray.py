import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import ConfigError
from foretrain.network.routing import Spray, bundled, groups, link_load
from foretrain.network.topology.graph import Builder
from tests.network.routing.networks import (
    LATENCY,
    RATE,
    all_pairs,
    check_paths,
    fat_tree,
    leaf_spine,
    random_network,
    server,
)


def test_a_bundle_carries_what_its_links_carry_together():
    spray = Spray(leaf_spine(leaves=4, spines=4, hosts=4))
    bundle = link_load(spray.paths(*all_pairs(spray.topology)), spray.topology)
    for leaf in range(4):
        assert bundle[spray.topology.between(f"leaf{leaf}", "spine")] == 4 * 12
        assert bundle[spray.topology.between("spine", f"leaf{leaf}")] == 4 * 12


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
    with pytest.raises(ConfigError, match="is not the one that is sprayed over"):
        Spray(fat_tree(4)).on(fat_tree(8))


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


def test_the_spines_of_a_leaf_spine_become_one():
    topology = bundled(leaf_spine(leaves=4, spines=8, hosts=2, cables=2))
    assert topology.counts() == {"host": 8, "switch": 5, "ranks": 8, "links": 2 * (8 + 4)}
    assert topology.rate[topology.between("leaf0", "spine")] == 16 * RATE
    assert topology.rate[topology.between("spine", "leaf3")] == 16 * RATE
    assert topology.rate[topology.between("h0", "leaf0")] == RATE
    assert np.unique(topology.latency) == LATENCY


def test_each_pod_of_a_fat_tree_has_one_aggregation_and_all_one_core():
    topology = bundled(fat_tree(8))
    assert topology.counts()["switch"] == 8 * 4 + 8 + 1
    assert topology.rate[topology.between("edge0", "pod0")] == 4 * RATE
    assert topology.rate[topology.between("pod0", "core")] == 16 * RATE


@pytest.mark.parametrize("make", [leaf_spine, fat_tree, lambda bundle: fat_tree(8, bundle=bundle)])
def test_what_is_found_is_what_a_generator_would_say(make):
    said, found = groups(make(bundle=True)), groups(make(bundle=False))
    assert np.array_equal(said, found)
    assert bundled(make(bundle=False)).nodes[-1].name.endswith(" like it")


def test_what_differs_is_not_put_together():
    topology = leaf_spine(spines=4, bundle=False)
    slow = topology.changed(topology.between("leaf0", "spine1"), rate=RATE / 2)
    assert bundled(slow).counts()["switch"] == 4 + 2
    far = topology.changed(topology.between("leaf0", "spine1"), latency=2 * LATENCY)
    assert bundled(far).counts()["switch"] == 4 + 2


def test_a_failure_does_not_change_the_groups_or_the_numbers_of_links():
    for bundle in (True, False):
        topology = leaf_spine(spines=4, bundle=bundle)
        down = topology.changed(topology.between("leaf0", "spine1"), up=False)
        whole, cut = bundled(topology), bundled(down)
        assert np.array_equal(whole.source, cut.source)
        assert np.array_equal(whole.target, cut.target)
        name = cut.nodes[-1].name
        assert cut.rate[cut.between("leaf0", name)] == 3 * RATE
        assert cut.rate[cut.between(name, "leaf0")] == 4 * RATE


def test_where_all_links_are_down_so_is_the_bundle():
    topology = leaf_spine(leaves=3, spines=2, hosts=1)
    disk = [i for i in range(2) for i in topology.between("leaf0", f"spine{i}")]
    cut = dataclasses.replace(topology, up=~np.isin(np.arange(topology.links), disk), ranks=topology.ranks[1:])
    found = bundled(cut)
    assert found.links == bundled(topology).links
    assert not found.up[found.between("leaf0", "spine")]
    assert found.up.sum() == found.links - 1


def test_background_adds_up_and_the_longest_latency_counts():
    topology = leaf_spine(spines=4)
    changed = topology.changed(topology.between("leaf0", "spine1"), background=RATE / 4, latency=3 * LATENCY)
    found = bundled(changed)
    link = found.between("leaf0", "spine")
    assert found.capacity[link] == 3.75 * RATE
    assert found.latency[link] == 3 * LATENCY


def test_links_of_a_greater_metric_are_left_out():
    build = Builder("metrics")
    a, b = build.node("a", "host"), build.node("b", "host")
    build.cable(a, b, rate=1e9, latency=1)
    build.cable(a, b, rate=4e9, latency=9, metric=2)
    build.cable(a, b, rate=2e9, latency=2)
    found = bundled(build.topology([a, b]))
    assert found.rate.tolist() == [3e9, 3e9]
    assert found.latency.tolist() == [2, 2]
    assert found.metric.tolist() == [1, 1]


def test_switches_linked_to_their_like_stay_apart():
    build = Builder("ring of switches")
    hosts = [build.node(name, "host") for name in "ab"]
    switches = [build.node(f"s{i}", "switch") for i in range(4)]
    for i, switch in enumerate(switches):
        build.cable(switch, switches[(i + 1) % 4], rate=1e9, latency=1)
        for host in hosts:
            build.cable(host, switch, rate=1e9, latency=1)
    topology = build.topology(hosts)
    assert len(np.unique(groups(topology))) == 6


@given(st.integers(0, 10**6))
def test_each_link_between_groups_is_one_that_every_member_of_a_group_has(seed):
    topology = random_network(seed)
    group = groups(topology)
    for a, b in {*zip(group[topology.source].tolist(), group[topology.target].tolist(), strict=True)}:
        between = (group[topology.source] == a) & (group[topology.target] == b)
        counts = np.bincount(topology.source[between], minlength=len(group))[group == a]
        assert (counts == counts[0]).all()
    assert bundled(server()).counts() == server().counts()


def test_a_bundled_rank_and_a_name_that_is_taken_are_refused():
    build = Builder("wrong")
    nodes = [build.node(name, "host", bundle="x") for name in "ab"]
    build.cable(*nodes, rate=1e9, latency=1)
    with pytest.raises(ConfigError, match=r"nodes.a.bundle: 'x' bundles a rank"):
        bundled(build.topology(nodes))
    build = Builder("names")
    hosts = [build.node(name, "host") for name in "ab"]
    for switch in (build.node(name, "switch", bundle="" if name == "x" else "x") for name in "xyz"):
        for host in hosts:
            build.cable(host, switch, rate=1e9, latency=1)
    with pytest.raises(ConfigError, match="'x' is the name of two nodes"):
        bundled(build.topology(hosts))
