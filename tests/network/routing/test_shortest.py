import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import ConfigError
from foretrain.network.routing import Shortest
from foretrain.network.topology.graph import Builder
from tests.network.routing.networks import all_pairs, check_paths, fat_tree, leaf_spine, random_network, server


def distances(topology):
    """Between ranks, by networkx: each pair in a graph of its own, without other nodes that do not forward."""
    graph = topology.graph()
    graph.remove_edges_from([(a, b, k) for a, b, k, up in graph.edges(keys=True, data="up") if not up])
    ends = {i for i, node in enumerate(topology.nodes) if not node.forwards}
    found = {}
    for source, target, _ in zip(*all_pairs(topology), strict=True):
        between = graph.subgraph(set(graph) - ends | {source, target})
        found[int(source), int(target)] = nx.dijkstra_path_length(between, source, target, weight="metric")
    return found


@given(st.integers(0, 10**6), st.sampled_from([1, 3]))
def test_no_path_is_shorter(seed, metrics):
    topology = random_network(seed, metrics=metrics)
    sources, targets, connections = all_pairs(topology)
    paths = Shortest(topology).paths(sources, targets, connections)
    check_paths(topology, paths, sources, targets)
    lengths = [int(topology.metric[paths.of(i)].sum()) for i in range(len(paths))]
    expected = distances(topology)
    assert lengths == [expected[pair] for pair in zip(sources.tolist(), targets.tolist(), strict=True)]


def test_a_tie_goes_to_the_lowest_link():
    topology = leaf_spine(leaves=2, spines=3, hosts=2, cables=2)
    paths = Shortest(topology).paths(*all_pairs(topology))
    spines = {int(topology.target[link]) for link in paths.links if topology.nodes[topology.target[link]].tier == 2}
    assert {topology.nodes[spine].name for spine in spines} == {"spine0"}
    assert len(np.unique(paths.links)) == 2 * 4 + 2 * 2


def test_the_connection_does_not_matter():
    topology = fat_tree(4)
    router = Shortest(topology)
    sources, targets, connections = all_pairs(topology)
    one, other = router.paths(sources, targets, connections), router.paths(sources, targets, connections + 7)
    assert np.array_equal(one.links, other.links)


def test_whoever_sends_to_itself_crosses_nothing():
    topology = leaf_spine()
    paths = Shortest(topology).paths(topology.ranks, topology.ranks, topology.ranks)
    assert len(paths) == 16
    assert not len(paths.links)


def test_inside_a_server_the_fast_way_is_the_short_one():
    topology = server()
    a, b = topology.node("s0.gpu0"), topology.node("s0.gpu3")
    paths = Shortest(topology).paths(np.array([a], np.int32), np.array([b], np.int32), np.zeros(1, np.int32))
    assert topology.nodes[topology.target[paths.of(0)[0]]].name == "s0.nvswitch"


def test_order_of_flows_is_kept():
    topology = fat_tree(4)
    sources, targets, connections = all_pairs(topology)
    mixed = np.random.default_rng(1).permutation(len(sources))
    straight = Shortest(topology).paths(sources, targets, connections).gather(mixed)
    shuffled = Shortest(topology).paths(sources[mixed], targets[mixed], connections[mixed])
    assert np.array_equal(straight.links, shuffled.links)
    assert np.array_equal(straight.first, shuffled.first)


def test_no_flows_no_paths():
    none = np.zeros(0, np.int32)
    assert len(Shortest(leaf_spine()).paths(none, none, none)) == 0


def test_whoever_cannot_be_reached_is_named():
    build = Builder("island")
    a, b, s = build.node("a", "host"), build.node("b", "host"), build.node("s", "switch")
    build.node("disk", "storage")
    build.cable(a, s, rate=1e9, latency=1)
    build.cable(b, s, rate=1e9, latency=1)
    topology = build.topology([a, b])
    columns = (np.array(c, np.int32) for c in ([0, 0, 1], [1, 3, 3], [0, 0, 0]))
    with pytest.raises(ConfigError, match=r"'a -> disk' has no way .* \(nor have 1 other pairs\); add a link"):
        Shortest(topology).paths(*columns)


def test_hosts_pass_nothing_on():
    build = Builder("line")
    a, b, c = (build.node(name, "host", forwards=name == "b") for name in "abc")
    build.cable(a, b, rate=1e9, latency=1)
    build.cable(b, c, rate=1e9, latency=1)
    topology = build.topology([a, b, c])
    sources, targets, connections = all_pairs(topology)
    check_paths(topology, Shortest(topology).paths(sources, targets, connections), sources, targets)
    build.nodes[b] = build.nodes[b].__class__("b", "host")
    ends = build.topology([a, b])
    with pytest.raises(ConfigError, match="a -> c"):
        Shortest(ends).paths(*(np.array([i], np.int32) for i in (a, c, 0)))


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
