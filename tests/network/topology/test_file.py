"""Topologies in files: what is read, that nothing is lost, and what is said of mistakes."""

from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import ConfigError
from foretrain.network.deployment_notation import topology
from foretrain.network.fabrics import FABRICS
from foretrain.network.fabrics.clos import fat_tree, leaf_spine, rail, star
from foretrain.network.servers import SERVERS, preset
from foretrain.network.topology.file import load, save
from foretrain.network.topology.graph import Builder, Topology
from tests.network.ways import COLUMNS, equal

RATE = 1.25e10
PAIR = """
name = "pair"
nodes = [{ name = "a", kind = "host" }, { name = "b", kind = "host", slowdown = 2 }, { name = "s", kind = "switch" }]
links = [
  { between = ["a", "s"], rate = "10Gbps", latency = "500ns" },
  { between = ["b", "s"], rate = "10Gbps", latency = "1us", background = "4Gbps", metric = 3 },
]
"""


@pytest.fixture
def written(tmp_path: Path):
    def write(text: str, name: str = "mine.toml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_node_by_node(written):
    made = load(written(PAIR))
    assert made.counts() == {"host": 2, "switch": 1, "ranks": 2, "links": 4}
    assert made.slowdown == 2.0
    for pair in (("b", "s"), ("s", "b")):
        (link,) = made.between(*pair)
        found = made.rate[link], made.latency[link], made.metric[link], made.background[link]
        assert found == (1.25e9, 10**6, 3, 5e8)
    assert load(written(PAIR + 'ranks = ["b", "a"]')).ranks.tolist() == [1, 0]
    assert topology(str(written(PAIR))).name == "pair"


def test_a_fabric_and_what_is_changed_in_it(written):
    made = load(
        written("""
            kind = "fat_tree"
            k = 4
            rate = "100Gbps"
            changes = [
              { between = ["pod0.edge0", "pod0.agg0"], up = false },
              { from = "pod1.agg0", to = "core0", rate = "10Gbps", latency = "2us" },
              { between = ["pod2.agg1", "core2"], background = "40Gbps" },
            ]
            stragglers = { host3 = 1.2, host5 = 2 }
            """)
    )
    expected = fat_tree(4, RATE)
    for pair in (("pod0.edge0", "pod0.agg0"), ("pod0.agg0", "pod0.edge0")):
        expected = expected.changed(expected.between(*pair), up=False)
    expected = expected.changed(expected.between("pod1.agg0", "core0"), rate=1.25e9, latency=2_000_000)
    for pair in (("pod2.agg1", "core2"), ("core2", "pod2.agg1")):
        expected = expected.changed(expected.between(*pair), background=5e9)
    assert equal(made, expected.straggling({"host3": 1.2, "host5": 2.0}))
    assert not made.symmetric


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Rings with parallel links, odd numbers and names."""
    name = st.text(st.characters(exclude_categories=("C",)), min_size=1, max_size=6)
    names = draw(st.lists(name, min_size=2, max_size=5, unique=True))
    build = Builder("drawn")
    kinds = st.sampled_from(["host", "gpu", "switch", "nic"])
    nodes = [
        build.node(
            each,
            draw(kinds),
            forwards=True,
            server=draw(st.integers(-1, 3)),
            tier=draw(st.integers(0, 3)),
            reduces=draw(st.booleans()),
            bundle=draw(st.sampled_from(["", "b"])),
            slowdown=draw(st.floats(1, 9)),
        )
        for each in names
    ]
    for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True):
        for _ in range(draw(st.integers(1, 3))):
            rate = draw(st.floats(1, 1e12))
            build.link(
                a, b, rate=rate, latency=draw(st.integers(0, 10**12)), metric=draw(st.integers(1, 2**31 - 1)),
                background=draw(st.sampled_from([0.0, rate / 3])),
            )  # fmt: skip
    return build.topology(draw(st.permutations(nodes)), symmetric=False)


@pytest.mark.parametrize("suffix", ["toml", "graphml"])
@given(made=topologies())
def test_a_file_gives_back_what_was_written(made: Topology, suffix: str, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("drawn") / f"mine.{suffix}"
    save(made, path)
    again = load(path)
    assert equal(again, made)
    assert all(getattr(again, name).dtype == getattr(made, name).dtype for name in COLUMNS)


def test_graphml_of_others_is_read(tmp_path: Path):
    graph = nx.Graph()
    for name, kind in (("a", "host"), ("b", "host"), ("s", "switch")):
        graph.add_node(name, kind=kind)
    graph.add_edge("a", "s", rate="10Gbps", latency="500ns")
    graph.add_edge("b", "s", rate=1.25e9, latency=500_000, background=0.0, up=True)
    nx.write_graphml(graph, tmp_path / "mine.graphml")
    made = load(tmp_path / "mine.graphml")
    assert made.counts() == {"host": 2, "switch": 1, "ranks": 2, "links": 4}
    assert set(made.rate.tolist()) == {1.25e9}
    assert set(made.latency.tolist()) == {500_000}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes = [", "does not parse"),
        ("rate = '1Gbps'", "'rate' is unknown"),
        ("name = 'x'", "nodes: None are missing"),
        ("kind = 'fat_tee'", "did you mean 'fat_tree'"),
        ("kind = 'star'\nrate = '1Gbps'", "hosts is missing"),
        ("kind = 'star'\nhosts = '4'\nrate = '1Gbps'", "hosts: '4' is not a whole number"),
        ("kind = 'star'\nhosts = 4\nrate = 1e9", "rate: 1000000000.0 is not a rate"),
        ("kind = 'star'\nhosts = 4\nrate = '1Gbps'\nserver = 3", "is not the name of a server"),
        ("kind = 'torus'\nshape = 4\nrate = '1Gbps'", "write e.g. [4, 4, 4]"),
        ("kind = 'star'\nhosts = 2\nrate = '1Gbps'\nchanges = [{ between = ['host0', 'host1'], up = false }]",
         "host0 is linked to: switch"),
        ("kind = 'star'\nhosts = 2\nrate = '1Gbps'\nchanges = [{ between = ['host0', 'switch'], up = false }]",
         "has no way from rank 0 (host0) to rank 1 (host1)"),
        ("kind = 'star'\nhosts = 2\nrate = '1Gbps'\nchanges = [{ from = 'host0', up = false }]", "changes[0]"),
        ("kind = 'star'\nhosts = 2\nrate = '1Gbps'\nchanges = [{ between = ['host0', 'switch'] }]", "changes nothing"),
        ("kind = 'star'\nhosts = 2\nrate = '1Gbps'\nstragglers = { host7 = 1.2 }", "'host7' is unknown"),
        ("kind = 'star'\nhosts = 2\nrate = '1Gbps'\nstragglers = { host1 = 0.5 }", "is not a factor of at least 1"),
        (PAIR.replace("4Gbps", "40Gbps"), "is not between 0 and the link's rate"),
        (PAIR.replace("kind = \"switch\"", "kind = \"swich\""), "did you mean 'switch'"),
        (PAIR.replace("slowdown = 2", "slowdown = 'much'"), "nodes[1].slowdown: 'much' is not a number"),
        (PAIR.replace("slowdown", "slow"), "did you mean 'slowdown'"),
        (PAIR.replace('["b", "s"]', '["b", "t"]'), "links[1]: 't' is unknown"),
        (PAIR.replace('["b", "s"]', '["b"]'), "is not two names"),
        (PAIR.replace("links = [", "links = [{ from = 'a', to = 'b', rate = '1Gbps', latency = '1us' },"),
         "has no equal link in the other direction"),
        (PAIR.replace("metric = 3", "metric = 0"), "links[1].metric: 0 is not between 1"),
        (PAIR.replace('name = "b"', 'name = "a"'), "is the name of two nodes"),
        (PAIR + "ranks = ['c']", "ranks: 'c' is unknown"),
        (PAIR + "ranks = [1]", "is not a name"),
        (PAIR + "symmetric = 'yes'", "write true or false"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_their_place(text: str, said: str, written):
    path = written(text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_mistakes_of_graphml_are_named_too(written, tmp_path: Path):
    with pytest.raises(ConfigError, match="does not parse"):
        load(written("<graphml", "mine.graphml"))
    graph = nx.Graph()
    graph.add_edge("a", "b", rate="10Gbps", latency="1us")
    nx.write_graphml(graph, tmp_path / "other.graphml")
    with pytest.raises(ConfigError, match=r"nodes\[0\].kind is missing"):
        load(tmp_path / "other.graphml")
    with pytest.raises(ConfigError, match="is neither"):
        save(star(2, RATE), tmp_path / "mine.json")


@pytest.mark.parametrize("name", FABRICS)
def test_every_example_is_read(name: str):
    made = topology(FABRICS[name].example)
    assert made.name.startswith(name)
    assert topology(made) is made


def test_options_reach_the_fabric():
    text = "leaf_spine: 8x16 @ 100Gbps, oversubscription=2, spines=4, latency=1us"
    expected = leaf_spine(8, 16, 1.25e10, oversubscription=2, spines=4, latency=10**6)
    assert equal(topology(text), expected)
    assert equal(
        topology(text.replace("_", "-").upper().replace("GBPS", "Gbps").lower().replace("gbps", "Gbps")), expected
    )


@pytest.mark.parametrize("name", [name for name in SERVERS if name != "host"])
def test_a_servers_name_is_a_cluster_of_them(name: str):
    assert equal(topology(f"{name}:3"), rail(3, server=preset(name)))
    assert equal(topology(f"rail:3,server={name}"), rail(3, server=preset(name)))


def test_a_rate_replaces_that_of_the_servers_ports():
    made = topology("dgx-h100:2@100Gbps")
    assert set(made.rate[made.between("s0.nic3", "unit0.rail3")]) == {1.25e10}


@given(k=st.integers(1, 4), server=st.sampled_from(["host", "eflops", "dgx-a100"]))
def test_places_hold_what_is_asked_for(k: int, server: str):
    made = topology(f"fat_tree:{2 * k}@10Gbps,server={server}")
    assert len(made.ranks) == 2 * k**3 * preset(server).gpus


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fat_tee:4@1Gbps", "did you mean 'fat_tree'"),
        ("dgx-h10:4", "did you mean 'dgx-h100'"),
        ("4x8xV100@1Gbps", "known: bigraph"),
        ("star:16", "e.g. '100Gbps'"),
        ("star:16@100Gb", "is not a rate"),
        ("star:16@0Gbps", "above 0"),
        ("star@1Gbps", "write e.g. 'star:16@100Gbps'"),
        ("dgx-h100", "write e.g. 'dgx-h100:16'"),
        ("star:-1@1Gbps", "is not a row of whole numbers"),
        ("star:0@1Gbps", "hosts: 0 is not a whole number of at least 1"),
        ("bigraph:8@1Gbps", "is not SWITCHESxHOSTS"),
        ("bigraph:7x2@1Gbps", "is not an even number"),
        ("fat_tree:4@1Gbps,spines=2", "'spines' is unknown"),
        ("fat_tree:4@1Gbps,oversubscription=2.5", "oversubscription: 2.5 is not a whole number"),
        ("leaf_spine:2x2@1Gbps,oversubscription=many", "is not a positive number"),
        ("leaf_spine:2x2@1Gbps,spines=1.5", "spines: 1.5 is not a whole number"),
        ("star:4@1Gbps,latency=5", "latency: '5' is not a time"),
        ("star:4@1Gbps,latency=2e9s", "longer than an hour"),
        ("star:4@1Gbps,latency=1us,latency=2us", "is said twice"),
        ("star:4@1Gbps,latency", "has no value"),
        ("rail:4@1Gbps", "server is missing"),
        ("star:4,server=dgx-h10", "did you mean 'dgx-h100'"),
        ("torus:100000x100000@1Gbps", "makes 10000000000 ranks"),
        ("nowhere.toml", "cannot be read"),
        (7, "is not a text"),
    ],
)
def test_mistakes_are_named_with_what_to_write(text, said: str):
    with pytest.raises(ConfigError) as caught:
        topology(text)
    assert said in str(caught.value)
    assert str(text) in str(caught.value)
