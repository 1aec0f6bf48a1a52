"""A topology as arrays: what the builder makes, what it refuses, and what can be changed."""

from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import ConfigError
from foretrain.network.deployment_notation import topology
from foretrain.network.topology.graph import Builder, Topology
from tests.network.ways import equal

RATE, LATENCY = 1.25e9, 500_000


def pair() -> tuple[Builder, list[int]]:
    build = Builder("pair")
    a, b, s = build.node("a", "host"), build.node("b", "host"), build.node("s", "switch", tier=1)
    build.cable(a, s, rate=RATE, latency=LATENCY)
    build.cable(b, s, rate=RATE, latency=LATENCY)
    return build, [a, b]


@pytest.fixture
def made() -> Topology:
    build, ranks = pair()
    return build.topology(ranks)


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda ab: ab[0] != ab[1]), max_size=30))
def test_links_are_sorted_by_where_they_leave(pairs: list[tuple[int, int]]):
    build = Builder("drawn")
    nodes = [build.node(f"s{i}", "switch") for i in range(8)]
    for number, (a, b) in enumerate(pairs):
        build.link(a, b, rate=1.0 + number, latency=0)
    made = build.topology(nodes[:1], symmetric=False)
    for node in nodes:
        leaving = slice(made.first[node], made.first[node + 1])
        expected = sorted((b, 1.0 + number) for number, (a, b) in enumerate(pairs) if a == node)
        assert list(zip(made.target[leaving].tolist(), made.rate[leaving].tolist(), strict=True)) == expected
        assert set(made.source[leaving].tolist()) <= {node}


def test_counts_and_words(made: Topology):
    assert made.counts() == {"host": 2, "switch": 1, "ranks": 2, "links": 4}
    assert str(made) == "pair: 2 host, 1 switch, 2 ranks, 4 links"
    assert made.ranks_of_servers() == ((0,), (1,))
    assert topology("rail:2,server=eflops").ranks_of_servers() == (tuple(range(8)), tuple(range(8, 16)))
    assert made.symmetric


def test_links_are_found_by_the_names_of_their_ends(made: Topology):
    (link,) = made.between("a", "s")
    assert (made.source[link], made.target[link], made.link_name(link)) == (0, 2, "a -> s")
    with pytest.raises(ConfigError, match="a is linked to: s"):
        made.between("a", "b")
    with pytest.raises(ConfigError, match="known: a, b, s"):
        made.node("c")
    assert made.hold(2) is made
    with pytest.raises(ConfigError, match="has 2 ranks and cannot hold 3"):
        made.hold(3)


def test_a_change_makes_another_topology(made: Topology):
    link = made.between("a", "s")
    other = made.changed(link, rate=RATE / 2, latency=7, background=RATE / 4)
    assert (other.rate[link], other.latency[link], other.background[link]) == (RATE / 2, 7, RATE / 4)
    assert other.capacity[link] == RATE / 4
    assert not other.symmetric
    assert equal(made, pair()[0].topology([0, 1]))
    assert equal(other.changed(link, rate=RATE, latency=LATENCY, background=0.0), made)


def test_what_is_down_carries_nothing_and_may_not_cut_ranks_off():
    made = topology("leaf_spine:2x1@10Gbps,spines=2")
    less = made.changed(made.between("leaf0", "spine0"), up=False)
    assert less.capacity[made.between("leaf0", "spine0")] == 0
    with pytest.raises(ConfigError, match=r"no way from rank 0 \(host0\) to rank 1 \(host1\)"):
        less.changed(made.between("leaf0", "spine1"), up=False)
    with pytest.raises(ConfigError, match=r"no way from rank 1 \(host1\) to rank 0 \(host0\)"):
        less.changed(made.between("spine1", "leaf0"), up=False).changed(made.between("spine0", "leaf0"), up=False)
    build = Builder("line")  # a host does not pass on what is for others
    ends = [build.node(name, "host") for name in "abc"]
    for pair in pairwise(ends):
        build.cable(*pair, rate=RATE, latency=0)
    with pytest.raises(ConfigError, match="no way from rank 0"):
        build.topology(ends)
    assert len(build.topology(ends[:2]).ranks) == 2


def test_stragglers(made: Topology):
    assert made.slowdown == 1.0
    assert made.straggling({"b": 1.5, "s": 3.0}).slowdown == 1.5
    with pytest.raises(ConfigError, match=r"nodes\.b\.slowdown"):
        made.straggling({"b": 0.9})


@pytest.mark.parametrize("text", ["fat_tree:4@1Gbps", "dgx-v100:2", "torus:2x3@1Gbps"])
def test_networkx_sees_the_same(text: str):
    made = topology(text)
    graph = made.graph()
    assert (graph.number_of_nodes(), graph.number_of_edges()) == (len(made.nodes), made.links)
    assert nx.is_strongly_connected(graph)
    assert [data["name"] for _, data in graph.nodes(data=True)] == [node.name for node in made.nodes]
    ranked = sorted((data["rank"], node) for node, data in graph.nodes(data=True) if "rank" in data)
    assert [node for _, node in ranked] == made.ranks.tolist()
    for a, b, link, data in graph.edges(keys=True, data=True):
        assert (made.source[link], made.target[link]) == (a, b)
        assert (data["rate"], data["latency"]) == (made.rate[link], made.latency[link])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rate": 0.0}, "rate: 0.0 is not a positive rate"),
        ({"rate": float("nan")}, "is not a positive rate"),
        ({"latency": -1}, "is negative"),
        ({"metric": 0}, "is below 1"),
        ({"background": RATE}, "is not between 0 and the link's rate"),
    ],
)
def test_impossible_links_are_refused(change: dict, said: str):
    build, ranks = pair()
    for a, b in ((0, 1), (1, 0)):
        build.link(a, b, **{"rate": RATE, "latency": 0} | change)
    with pytest.raises(ConfigError, match=said):
        build.topology(ranks)


def test_impossible_nodes_and_ranks_are_refused(made: Topology):
    build, ranks = pair()
    for wrong, said in (([], "is empty"), ([0, 0], "are not different nodes"), ([0, 9], "are not different nodes")):
        with pytest.raises(ConfigError, match=said):
            build.topology(wrong)
    build.node("a", "host")
    with pytest.raises(ConfigError, match="is the name of two nodes"):
        build.topology(ranks)
    with pytest.raises(ConfigError, match="is not a list of links"):
        made.changed(np.array([4]), up=False)


def test_one_way_is_refused_where_both_are_promised():
    build, ranks = pair()
    build.link(0, 1, rate=RATE, latency=0)
    with pytest.raises(ConfigError, match="a -> b' has no equal link"):
        build.topology(ranks)
    assert not build.topology(ranks, symmetric=False).symmetric
