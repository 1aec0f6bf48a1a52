import math
from collections import Counter
from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import ConfigError
from foretrain.network.routing import Ecmp, Shortest, link_load
from tests.network.routing.networks import all_pairs, check_paths, fat_tree, leaf_spine, random_network


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


def test_another_connection_may_take_another_way():
    topology = leaf_spine(leaves=2, spines=8, hosts=1)
    flows = [np.zeros(64, np.int32), np.ones(64, np.int32), np.arange(64, dtype=np.int32)]
    assert len(np.unique(link_load(Ecmp(topology).paths(*flows), topology).nonzero()[0])) == 2 + 8 + 8


def test_links_that_are_down_are_not_hashed_onto():
    topology = leaf_spine()
    down = topology.changed(topology.between("leaf0", "spine1"), up=False)
    flows = all_pairs(down, connections=4)
    paths = Ecmp(down).paths(*flows)
    check_paths(down, paths, *flows[:2])
    into = link_load(paths, down)[down.between("spine1", "leaf0")]
    assert into > 0
    assert {len(paths.of(i)) for i in range(len(paths))} == {2, 4}


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


def test_where_there_is_one_way_ecmp_is_the_shortest():
    topology = leaf_spine(spines=1)
    flows = all_pairs(topology)
    assert np.array_equal(Ecmp(topology).paths(*flows).links, Shortest(topology).paths(*flows).links)
