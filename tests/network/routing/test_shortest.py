import itertools
import math
from collections import Counter
from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import ConfigError
from foretrain.network.routing import Adaptive, Ecmp, Shortest, link_load
from foretrain.network.topology.graph import Builder
from tests.network.routing.networks import all_pairs, check_paths, fat_tree, leaf_spine, random_network


@given(st.integers(0, 10**6), st.sampled_from([1, 3]))
def test_no_path_is_shorter(seed, metrics):
    topology = random_network(seed, metrics=metrics)
    sources, targets, connections = all_pairs(topology)
    paths = Shortest(topology).paths(sources, targets, connections)
    check_paths(topology, paths, sources, targets)
    for flow in np.random.default_rng(seed).choice(len(sources), min(len(sources), 8), replace=False).tolist():
        assert tuple(paths.of(flow).tolist()) in every_shortest_path(topology, int(sources[flow]), int(targets[flow]))


def test_a_tie_goes_to_the_lowest_link():
    topology = leaf_spine(leaves=2, spines=3, hosts=2, cables=2)
    paths = Shortest(topology).paths(*all_pairs(topology))
    spines = {int(topology.target[link]) for link in paths.links if topology.nodes[topology.target[link]].tier == 2}
    assert {topology.nodes[spine].name for spine in spines} == {"spine0"}
    assert len(np.unique(paths.links)) == 2 * 4 + 2 * 2


def test_a_flow_to_its_own_source_crosses_nothing():
    topology = leaf_spine()
    paths = Shortest(topology).paths(topology.ranks, topology.ranks, topology.ranks)
    assert (len(paths), len(paths.links)) == (16, 0)
    assert len(Shortest(topology).paths(*np.zeros((3, 0), np.int32))) == 0


def test_order_of_flows_is_kept_and_their_connection_does_not_matter():
    topology = fat_tree(4)
    sources, targets, connections = all_pairs(topology)
    mixed = np.random.default_rng(1).permutation(len(sources))
    straight = Shortest(topology).paths(sources, targets, connections).gather(mixed)
    shuffled = Shortest(topology).paths(sources[mixed], targets[mixed], connections[mixed] + 7)
    assert np.array_equal(straight.links, shuffled.links)
    assert np.array_equal(straight.first, shuffled.first)


@pytest.mark.parametrize("policy", [Shortest, Adaptive])
def test_whoever_cannot_be_reached_is_named(policy):
    build = Builder("island")
    a, b, s = build.node("a", "host"), build.node("b", "host"), build.node("s", "switch")
    build.node("disk", "storage")
    build.cable(a, s, rate=1e9, latency=1)
    build.cable(b, s, rate=1e9, latency=1)
    topology = build.topology([a, b])
    columns = (np.array(c, np.int32) for c in ([0, 0, 1], [1, 3, 3], [0, 0, 0]))
    with pytest.raises(ConfigError, match=r"'a -> disk' has no way .* \(nor have 1 other pairs\); add a link"):
        policy(topology).paths(*columns)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([0, 99], [1, 2], [0, 0]), r"sources\[1\]: 99 is no node"),
        (([0, 1], [1, -1], [0, 0]), r"targets\[1\]: -1 is no node"),
        (([0, 1], [1], [0, 0]), "are not equally many"),
    ],
)
def test_what_is_no_flow_is_refused(columns, message):
    with pytest.raises(ConfigError, match=message):
        Shortest(leaf_spine()).paths(*(np.array(column, np.int32) for column in columns))


def every_shortest_path(topology, source, target):
    """Each shortest path, by networkx over nodes, with parallel links of the least metric told apart."""
    passing = [i for i, node in enumerate(topology.nodes) if node.forwards or i in (source, target)]
    graph = topology.graph().subgraph(passing)
    found = set()
    plain = nx.DiGraph()
    for a, b, metric in graph.edges(data="metric"):
        least = min(metric, plain.edges[a, b]["metric"]) if plain.has_edge(a, b) else metric
        plain.add_edge(a, b, metric=least)
    for nodes in nx.all_shortest_paths(plain, source, target, weight="metric"):
        paths = [()]
        for a, b in pairwise(nodes):
            least = plain.edges[a, b]["metric"]
            links = [key for key, data in graph[a][b].items() if data["metric"] == least]
            paths = [(*path, link) for path in paths for link in links]
        found.update(paths)
    return found


def shares(topology, paths):
    """How often each path is expected if every node chooses evenly among the links that paths leave it by."""
    following = {}
    for path in paths:
        for link in path:
            following.setdefault(int(topology.source[link]), set()).add(link)
    return {path: math.prod(1 / len(following[int(topology.source[link])]) for link in path) for path in paths}


@given(st.integers(0, 10**6), st.sampled_from([1, 3]))
def test_every_shortest_path_is_used_and_no_other(seed, metrics):
    topology = random_network(seed, metrics=metrics)
    router = Ecmp(topology, seed=seed)
    source, target = topology.ranks[:2].tolist()
    expected = shares(topology, every_shortest_path(topology, source, target))
    count = int(400 / min(expected.values()))
    flows = [np.full(count, source, np.int32), np.full(count, target, np.int32), np.arange(count, dtype=np.int32)]
    paths = router.paths(*flows)
    check_paths(topology, paths.gather(np.arange(20)), flows[0][:20], flows[1][:20])
    rows = np.split(paths.links, paths.first[1:-1])
    used = Counter(tuple(row.tolist()) for row in rows)
    assert used.keys() == expected.keys()
    for path, share in expected.items():
        assert abs(used[path] - share * count) <= 6 * math.sqrt(share * count)


def test_a_flow_keeps_its_path_whatever_else_is_routed():
    topology = fat_tree(4)
    flows = all_pairs(topology, connections=3)
    whole = Ecmp(topology, seed=5).paths(*flows)
    few = np.arange(0, len(flows[0]), 7)
    alone = Ecmp(topology, seed=5).paths(*(column[few] for column in flows))
    assert np.array_equal(whole.gather(few).links, alone.links)


def test_another_seed_is_another_outcome():
    topology = fat_tree(4)
    flows = all_pairs(topology)
    outcomes = {Ecmp(topology, seed=seed).paths(*flows).links.tobytes() for seed in range(8)}
    assert len(outcomes) == 8


def core_links(topology):
    tier = np.array([node.tier for node in topology.nodes])
    return np.flatnonzero((tier[topology.source] == 2) & (tier[topology.target] == 3))


def test_polarised_hashes_leave_links_to_the_core_unused():
    topology = fat_tree(8)
    flows = all_pairs(topology, connections=4)
    salted = link_load(Ecmp(topology).paths(*flows), topology)[core_links(topology)]
    polarised = link_load(Ecmp(topology, polarised=True).paths(*flows), topology)[core_links(topology)]
    assert salted.all()
    # What an edge switch hashes onto its aggregation switch i is hashed onto core i of that switch again: 1 of 4 links.
    assert (polarised > 0).mean() == 1 / 4
    assert salted.sum() == polarised.sum()


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, True, "1"])
def test_a_seed_has_32_bits(seed):
    with pytest.raises(ConfigError, match="seed"):
        Ecmp(fat_tree(2), seed=seed)


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
    flows, sizes = crossing(3), np.array([3.0, 1.0, 1.0])
    up = [topology.between("leaf0", f"spine{i}")[0] for i in range(2)]
    assert sorted(link_load(Adaptive(topology).paths(*flows, sizes=sizes), topology, sizes)[up]) == [2, 3]
    slow = topology.changed(up[:1], background=topology.rate[0] * 0.75)
    assert link_load(Adaptive(slow).paths(*flows), slow)[up].tolist() == [0, 3]


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


@pytest.mark.parametrize("policy", [Ecmp, Adaptive])
def test_where_there_is_one_way_it_is_taken(policy):
    topology = leaf_spine(spines=1)
    flows = all_pairs(topology)
    assert np.array_equal(policy(topology).paths(*flows).links, Shortest(topology).paths(*flows).links)


@pytest.mark.parametrize("load", [[1.0], -np.ones(4 * 16 * 2), np.full(64, np.nan)])
def test_wrong_loads_and_sizes_are_refused(load):
    with pytest.raises(ConfigError, match="load"):
        Adaptive(leaf_spine(), load=np.asarray(load))
    with pytest.raises(ConfigError, match="sizes"):
        Adaptive(leaf_spine()).paths(*crossing(4), sizes=np.ones(3))
