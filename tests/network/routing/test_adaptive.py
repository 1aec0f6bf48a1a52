import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import ConfigError
from foretrain.network.routing import Adaptive, Ecmp, Shortest, link_load
from tests.network.routing.networks import all_pairs, check_paths, fat_tree, leaf_spine, random_network
from tests.network.routing.test_ecmp import every_shortest_path


def crossing(hosts):
    """Host i of the first leaf to host i of the second."""
    return np.arange(hosts, dtype=np.int32), np.arange(hosts, 2 * hosts, dtype=np.int32), np.zeros(hosts, np.int32)


def test_flows_spread_perfectly_where_ecmp_collides():
    topology = leaf_spine(leaves=2, spines=8, hosts=8)
    flows = crossing(8)
    assert link_load(Ecmp(topology).paths(*flows), topology).max() > 1
    assert link_load(Adaptive(topology).paths(*flows), topology).max() == 1


def test_an_all_to_all_loads_all_links_alike():
    topology = fat_tree(4)
    tier = np.array([node.tier for node in topology.nodes])
    load = link_load(Adaptive(topology).paths(*all_pairs(topology)), topology)
    for below, above in itertools.pairwise((1, 2, 3)):
        upwards = load[(tier[topology.source] == below) & (tier[topology.target] == above)]
        assert upwards.max() - upwards.min() <= 1


@given(st.integers(0, 10**6), st.sampled_from([1, 3]))
def test_each_flow_takes_the_best_path_there_is(seed, metrics):
    topology = random_network(seed, metrics=metrics)
    draw = np.random.default_rng(seed)
    load = draw.integers(0, 6, topology.links).astype(np.float64)
    topology = topology.changed([*range(0, topology.links, 3)], background=topology.rate.min() / 2)
    source, target = topology.ranks[:2].tolist()
    flow = [np.array([i], np.int32) for i in (source, target, 0)]
    paths = Adaptive(topology, load=load).paths(*flow, sizes=np.array([2.0]))
    check_paths(topology, paths, *flow[:2])
    cost = (load + 2) / topology.capacity

    def key(path, choice):
        return max(cost[list(path)][choice]), round(sum(cost[list(path)][choice]) * topology.rate.max(), 6)

    # The link into a destination with parallel links is chosen by itself; it never makes a path worse.
    everything = slice(None)
    best = min(key(path, everything) for path in every_shortest_path(topology, source, target))
    assert key(paths.links.tolist(), everything)[0] == best[0]


def test_sizes_count_in_relation_to_capacity():
    topology = leaf_spine(leaves=2, spines=2, hosts=3)
    flows = crossing(3)
    spine = [f"spine{i}" for i in range(2)]
    paths = Adaptive(topology).paths(*flows, sizes=np.array([3.0, 1.0, 1.0]))
    assert sorted(
        link_load(paths, topology, np.array([3.0, 1.0, 1.0]))[topology.between("leaf0", s)[0]] for s in spine
    ) == [
        2,
        3,
    ]
    slow = topology.changed(topology.between("leaf0", "spine0"), background=topology.rate[0] * 0.75)
    load = link_load(Adaptive(slow).paths(*flows), slow)
    assert [load[slow.between("leaf0", s)[0]] for s in spine] == [0, 3]


def test_load_that_is_there_is_avoided_and_remembered_on_request():
    topology = leaf_spine(leaves=2, spines=4, hosts=4)
    router = Adaptive(topology)
    one, two = (tuple(column[part] for column in crossing(4)) for part in (slice(0, 2), slice(2, 4)))
    first = router.paths(*one)
    assert np.array_equal(first.links, router.paths(*one).links)
    later = router.reload(link_load(first, topology)).paths(*two)
    assert (link_load(first, topology) + link_load(later, topology)).max() == 1
    assert not router.load.any()


def test_a_connection_has_one_path_however_often_it_is_named():
    topology = leaf_spine(leaves=2, spines=4, hosts=1)
    source, target = np.zeros(6, np.int32), np.ones(6, np.int32)
    paths = Adaptive(topology).paths(source, target, np.array([5, 0, 5, 1, 0, 5], np.int32))
    rows = [tuple(paths.of(i)) for i in range(6)]
    assert rows[0] == rows[2] == rows[5]
    assert rows[1] == rows[4]
    assert len(set(rows)) == 3


def test_where_there_is_one_way_it_is_taken():
    topology = leaf_spine(spines=1)
    flows = all_pairs(topology)
    assert np.array_equal(Adaptive(topology).paths(*flows).links, Shortest(topology).paths(*flows).links)


@pytest.mark.parametrize("load", [[1.0], -np.ones(4 * 16 * 2), np.full(64, np.nan)])
def test_what_is_no_load_is_refused(load):
    with pytest.raises(ConfigError, match="load"):
        Adaptive(leaf_spine(), load=np.asarray(load))


def test_what_are_no_sizes_is_refused():
    topology = leaf_spine()
    with pytest.raises(ConfigError, match="sizes"):
        Adaptive(topology).paths(*crossing(4), sizes=np.ones(3))


def test_whoever_cannot_be_reached_is_named():
    topology = leaf_spine(leaves=2, spines=2, hosts=2)
    ends = [topology.node(name) for name in ("spine0", "spine1")]
    cut = topology.changed(topology.between("leaf0", "spine0"), up=False)
    cut = cut.changed([*cut.between("leaf1", "spine0")], up=False)
    with pytest.raises(ConfigError, match="'spine1 -> spine0' has no way"):
        Adaptive(cut).paths(*(np.array(c, np.int32) for c in ([0, ends[1]], [1, ends[0]], [0, 0])))
