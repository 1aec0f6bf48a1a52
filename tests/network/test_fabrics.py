"""Fabrics: closed-form counts, what they promise to carry, and the ways through them."""

from itertools import combinations, pairwise, product
from math import prod

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import ConfigError
from foretrain.network.fabrics.clos import bigraph, fat_tree, leaf_spine, rail, star
from foretrain.network.fabrics.direct import dragonfly, torus
from foretrain.network.servers import NVSwitch, PCIeTree, preset
from foretrain.network.topology.graph import Topology
from tests.network.ways import graph, names, shortest

RATE = 1.25e9
SMALL = PCIeTree(
    sockets=1, switches=2, ports=1, gpus_per_port=1, nics_per_port=1, lanes=4e9, port=RATE, peer=1e9
)  # fmt: skip
WITH_SERVERS = [
    star(3, server=SMALL),
    fat_tree(4, server=SMALL),
    leaf_spine(2, 2, server=SMALL),
    bigraph(4, 2, server=SMALL),
    rail(4, server=SMALL),
    torus((3, 3), server=SMALL),
    dragonfly(2, 1, 1, server=SMALL),
]


def crossing(topology: Topology, group: set[int]) -> float:
    """Most bytes/s from the ranks in ``group`` to all others."""
    made = graph(topology)
    for rank, node in enumerate(topology.ranks.tolist()):
        if rank in group:
            made.add_edge("from", node)
        else:
            made.add_edge(node, "to")
    return nx.maximum_flow_value(made, "from", "to")


def count(topology: Topology, kind: str = "switch", tier: int | None = None) -> int:
    return sum(node.kind == kind and tier in (None, node.tier) for node in topology.nodes)


@given(hosts=st.integers(1, 40))
def test_star(hosts: int):
    assert star(hosts, RATE).counts() == {"host": hosts, "switch": 1, "ranks": hosts, "links": 2 * hosts}


@given(half=st.integers(1, 5), over=st.integers(1, 3))
def test_fat_tree(half: int, over: int):
    k, hosts = 2 * half, over * 2 * half * half * half
    made = fat_tree(k, RATE, oversubscription=over)
    assert made.counts() == {
        "host": hosts, "switch": 5 * half * half, "ranks": hosts, "links": 2 * (hosts + 2 * k * half * half),
    }  # fmt: skip
    assert [count(made, tier=tier) for tier in (1, 2, 3)] == [k * half, k * half, half * half]
    ports = np.diff(made.first)
    assert {int(ports[i]) for i, node in enumerate(made.nodes) if node.tier > 1} == {k}
    assert {node.bundle for node in made.nodes if node.tier == 3} == {"core"}
    assert len({node.bundle for node in made.nodes if node.tier == 2}) == k


@given(leaves=st.integers(1, 6), hosts=st.integers(1, 6), spines=st.integers(1, 6), over=st.floats(0.5, 8))
def test_leaf_spine(leaves: int, hosts: int, spines: int, over: float):
    made = leaf_spine(leaves, hosts, RATE, spines=spines, oversubscription=over)
    assert made.counts() == {
        "host": leaves * hosts, "switch": leaves + spines, "ranks": leaves * hosts,
        "links": 2 * leaves * (hosts + spines),
    }  # fmt: skip
    above = [i for i, node in enumerate(made.nodes) if node.tier == 2]
    assert made.rate[np.isin(made.target, above)].sum() * over == pytest.approx(leaves * hosts * RATE)
    assert {made.nodes[i].bundle for i in above} == {"spine"}
    # By default a leaf has spines enough for links as fast as its hosts.
    assert set(leaf_spine(leaves, 2 * hosts, RATE, oversubscription=2).rate.tolist()) == {RATE}


@given(half=st.integers(1, 6), hosts=st.integers(1, 6))
def test_bigraph(half: int, hosts: int):
    switches = 2 * half
    made = bigraph(switches, hosts, RATE)
    assert made.counts() == {
        "host": switches * hosts, "switch": switches, "ranks": switches * hosts,
        "links": 2 * (switches * hosts + half * half),
    }  # fmt: skip
    for upper, lower in product(range(half), repeat=2):
        assert len(made.between(f"upper{upper}", f"lower{lower}")) == 1
    for part, (a, b) in product(("upper", "lower"), combinations(range(half), 2)):
        with pytest.raises(ConfigError, match="does not exist"):
            made.between(f"{part}{a}", f"{part}{b}")


@given(servers=st.integers(1, 9), unit=st.integers(1, 4), spines=st.integers(1, 3))
def test_rail(servers: int, unit: int, spines: int):
    made = rail(servers, server=SMALL, unit=unit, spines=spines)
    units = -(-servers // min(unit, servers))
    assert count(made) == 2 * units + spines
    assert len(made.ranks) == 2 * servers
    inside = 2 * 2 * 3  # two GPUs, two NICs, two PCIe switches: each one link up
    assert made.links == servers * (inside + 2 * 2) + 2 * 2 * units * spines


@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_torus(shape: list[int]):
    made = torus(shape, RATE)
    cables = sum({1: 0, 2: 1}.get(size, size) * prod(shape) // size for size in shape)
    assert made.counts() == {"host": prod(shape), "ranks": prod(shape), "links": 2 * cables}
    degrees = sum({1: 0, 2: 1}.get(size, 2) for size in shape)
    assert set(np.diff(made.first).tolist()) == {degrees}
    assert len(set(zip(made.source.tolist(), made.target.tolist(), strict=True))) == made.links


@given(a=st.integers(1, 4), p=st.integers(1, 3), h=st.integers(1, 3))
def test_dragonfly(a: int, p: int, h: int):
    made, groups = dragonfly(a, p, h, RATE), a * h + 1
    hosts, local, across = a * p * groups, groups * a * (a - 1) // 2, groups * (groups - 1) // 2
    assert made.counts() == {
        "host": hosts, "switch": a * groups, "ranks": hosts, "links": 2 * (hosts + local + across),
    }  # fmt: skip
    ports = np.diff(made.first)
    assert {int(ports[i]) for i, node in enumerate(made.nodes) if node.kind == "switch"} == {p + a - 1 + h}
    joined = {
        frozenset(made.nodes[n].name.partition(".")[0] for n in pair)
        for pair in zip(made.source.tolist(), made.target.tolist(), strict=True)
        if all(made.nodes[n].kind == "switch" for n in pair)
    }
    assert sum(len(pair) == 2 for pair in joined) == across


@pytest.mark.parametrize("topology", WITH_SERVERS, ids=lambda made: made.name)
def test_a_place_holds_a_server(topology: Topology):
    assert topology.servers * SMALL.gpus == len(topology.ranks)
    assert topology.ranks_of_servers() == tuple((2 * i, 2 * i + 1) for i in range(topology.servers))


@pytest.mark.parametrize(
    "topology", [star(8, RATE), fat_tree(4, RATE), leaf_spine(4, 4, RATE), leaf_spine(4, 4, RATE, spines=3)]
)
def test_full_bisection_whatever_the_halves(topology: Topology):
    ranks = range(len(topology.ranks))
    for half in (set(ranks[: len(ranks) // 2]), set(ranks[::2]), set(np.random.default_rng(1).permutation(ranks)[::2])):
        assert crossing(topology, half) == pytest.approx(RATE * len(half))


@pytest.mark.parametrize(
    ("topology", "over"),
    [
        (fat_tree(4, RATE, oversubscription=2), 2),
        (leaf_spine(4, 6, RATE, oversubscription=3), 3),
        (fat_tree(4, server=SMALL), 1),
        (leaf_spine(4, 2, server=SMALL), 1),
        (rail(8, server=SMALL, unit=2), 1),
    ],
)
def test_servers_keep_full_bisection_and_what_is_oversubscribed_carries_that_much_less(topology: Topology, over: int):
    half = set(range(len(topology.ranks) // 2))
    assert crossing(topology, half) == pytest.approx(RATE * len(half) / over)


def test_hosts_in_different_parts_of_a_bigraph_have_one_direct_way():
    made = bigraph(6, 3, RATE)
    for a, b in combinations(range(18), 2):
        ways, (part_a, part_b) = shortest(made, a, b), (a // 9, b // 9)
        if part_a != part_b:
            assert len(ways) == 1
            assert len(ways[0]) == 2 + 2
        else:
            assert {len(way) for way in ways} == {2 + (1 if a // 3 == b // 3 else 3)}


def test_ways_of_a_fat_tree():
    made = fat_tree(4, RATE)
    assert [len(shortest(made, 0, b)) for b in (1, 2, 4)] == [1, 2, 4]
    assert [len(shortest(made, 0, b)[0]) - 2 for b in (1, 2, 4)] == [1, 3, 5]


def test_minimal_routing_of_a_dragonfly_takes_one_global_link():
    made = dragonfly(4, 2, 2, RATE)
    for b in range(8, 72, 5):
        ways = shortest(made, 0, b)
        assert len(ways) == 1
        groups = [name.partition(".")[0] for name in names(made, ways[0])[1:-1]]
        assert sum(x != y for x, y in pairwise(groups)) == 1


@given(shape=st.lists(st.integers(2, 4), min_size=1, max_size=3), data=st.data())
def test_hosts_of_a_torus_are_as_far_apart_as_their_coordinates(shape: list[int], data: st.DataObject):
    made = torus(shape, RATE)
    a, b = (data.draw(st.integers(0, prod(shape) - 1)) for _ in range(2))
    there, back = np.unravel_index(a, shape), np.unravel_index(b, shape)
    apart = [abs(int(x) - int(y)) for x, y in zip(there, back, strict=True)]
    expected = sum(min(d, size - d) for d, size in zip(apart, shape, strict=True))
    assert len(shortest(made, a, b)[0]) - 1 == expected


def test_gpus_of_one_rail_are_one_switch_apart_and_others_two_or_three():
    made = rail(4, server=preset("dgx-h100"), unit=2)
    switches = [sum(n.kind == "switch" for n in map(made.nodes.__getitem__, shortest(made, 0, b)[0])) for b in (8, 9)]
    assert switches == [1, 3]
    assert shortest(made, 0, 1)[0][1] == made.node("s0.nvswitch")


def test_rails_without_spines_meet_inside_the_servers():
    made = rail(2, server=preset("dgx-a100"), spines=0)
    for way in shortest(made, 0, 8 + 7):
        assert any(made.nodes[n].kind == "root" for n in way)
    assert isinstance(preset("dgx-a100"), NVSwitch)


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: star(0, RATE), "hosts"),
        (lambda: star(4), "rate"),
        (lambda: fat_tree(3, RATE), "k"),
        (lambda: fat_tree(4, RATE, oversubscription=0), "oversubscription"),
        (lambda: leaf_spine(2, 2, RATE, oversubscription=-1), "oversubscription"),
        (lambda: leaf_spine(2, 2, RATE, spines=0), "spines"),
        (lambda: bigraph(5, 2, RATE), "switches"),
        (lambda: rail(4, server=SMALL, unit=2, spines=0), "spines"),
        (lambda: torus((), RATE), "shape"),
        (lambda: torus((4, 0), RATE), "shape[1]"),
        (lambda: dragonfly(4, 2, 0, RATE), "h"),
    ],
)
def test_impossible_numbers_are_refused_by_name(build, field: str):
    with pytest.raises(ConfigError) as caught:
        build()
    assert caught.value.field == field
