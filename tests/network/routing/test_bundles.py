import dataclasses

import numpy as np
import pytest

from foretrain.errors import ConfigError
from foretrain.network.routing import bundled, contract, groups
from foretrain.network.topology.graph import Builder
from tests.network.routing.networks import LATENCY, RATE, fat_tree, leaf_spine, random_network, server


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


@pytest.mark.parametrize("seed", range(30))
def test_no_way_appears_that_is_not_there(seed):
    """Each link between groups found is one that every member of a group has."""
    topology = random_network(seed)
    group = groups(topology)
    for a, b in {*zip(group[topology.source].tolist(), group[topology.target].tolist(), strict=True)}:
        between = (group[topology.source] == a) & (group[topology.target] == b)
        counts = np.bincount(topology.source[between], minlength=len(group))[group == a]
        assert (counts == counts[0]).all()


def test_nothing_of_a_server_is_put_together():
    assert bundled(server()).counts() == server().counts()


def test_ranks_are_not_bundled():
    build = Builder("wrong")
    nodes = [build.node(name, "host", bundle="x") for name in "ab"]
    build.cable(*nodes, rate=1e9, latency=1)
    with pytest.raises(ConfigError, match=r"nodes.a.bundle: 'x' bundles a rank"):
        bundled(build.topology(nodes))


def test_a_bundle_has_a_name_of_its_own():
    build = Builder("names")
    a, b, x = build.node("a", "host"), build.node("b", "host"), build.node("x", "switch")
    more = [build.node(name, "switch", bundle="x") for name in "yz"]
    for switch in (x, *more):
        build.cable(a, switch, rate=1e9, latency=1)
        build.cable(b, switch, rate=1e9, latency=1)
    with pytest.raises(ConfigError, match="'x' is the name of two nodes"):
        bundled(build.topology([a, b]))


def test_contracting_nothing_changes_nothing():
    topology = fat_tree(4)
    same = contract(topology, np.arange(len(topology.nodes), dtype=np.int32))
    for name in ("first", "source", "target", "rate", "latency", "metric", "up", "background", "ranks"):
        assert np.array_equal(getattr(same, name), getattr(topology, name))
