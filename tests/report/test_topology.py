"""The page and the summary of a topology say what it is, and draw all of it."""

import json
import re

import numpy as np
import pytest
from rich.console import Console

from foretrain.errors import ConfigError
from foretrain.network.deployment_notation import topology
from foretrain.network.topology.graph import Topology
from foretrain.report.fabric_plot import different_servers, fabric, servers
from foretrain.report.topology import numbers, render, summary
from foretrain.report.topology_layout import DOWN, SHARED, SLOW, DrawnLinks, faults, link_kinds, link_states

TEXTS = [
    "star:3@1Gbps",
    "fat_tree:4@1Gbps",
    "bigraph:4x2@1Gbps",
    "torus:3x3@1Gbps",
    "dragonfly:2x1x1@1Gbps",
    "eflops:2",
]


@pytest.fixture(scope="module")
def ailing() -> Topology:
    """A fat tree with one cable of each fault."""
    made = topology("fat_tree:4@100Gbps")
    for pair, change in (
        (("pod0.edge0", "pod0.agg0"), {"up": False}),
        (("pod1.agg0", "core0"), {"rate": 1.25e9}),
        (("pod2.agg0", "core0"), {"background": 1.25e9}),
    ):
        made = made.changed(np.concatenate([made.between(*pair), made.between(*pair[::-1])]), **change)
    return made.straggling({"host3": 1.5})


def text_of(made: Topology) -> str:
    console = Console(width=140, highlight=False)
    with console.capture() as captured:
        console.print(summary(made))
    return captured.get()


def points(figure) -> set[tuple[float, float]]:
    """Where nodes are drawn."""
    traces = [trace for trace in figure.data if "hovertext" in trace]
    return {(x, y) for trace in traces for x, y in zip(trace["x"], trace["y"], strict=True)}


def drawn_lines(figure) -> int:
    return sum(trace["x"].count(None) for trace in figure.data if trace["mode"] == "lines")


def test_states_of_links(ailing: Topology):
    states = link_states(ailing, link_kinds(ailing))
    assert set(np.flatnonzero(states == DOWN)) == set(np.flatnonzero(~ailing.up))
    assert set(np.flatnonzero(states == SLOW)) == set(np.flatnonzero(ailing.rate < ailing.rate.max()))
    assert set(np.flatnonzero(states == SHARED)) == set(np.flatnonzero(ailing.background))
    assert len(faults(ailing, states)) == 4


@pytest.mark.parametrize("text", [*TEXTS, "dgx-v100:2", "leaf_spine:4x4@1Gbps,oversubscription=4"])
def test_a_sound_network_has_no_faults_and_every_link_is_of_one_kind(text: str):
    made = topology(text)
    kinds = link_kinds(made)
    assert faults(made, link_states(made, kinds)) == []
    assert sorted(np.concatenate([kind.links for kind in kinds]).tolist()) == list(range(made.links))


def test_the_summary_has_the_numbers(ailing: Topology):
    text = text_of(ailing)
    for words in (
        "16 on 16 hosts",
        "6 links",
        "8 on tier 1, 8 on tier 2, 4 on tier 3",
        "2 down",
        "1 straggler",
        "10.0 Gbps",
    ):
        assert words in text
    assert "all links up" in text_of(topology("star:2@1Gbps"))


def test_the_numbers_are_those_of_the_topology(ailing: Topology):
    table = json.loads(json.dumps(numbers(ailing)))
    assert table["counts"] == ailing.counts()
    assert sum(row["count"] for row in table["links"]) == ailing.links
    assert sum(row["down"] for row in table["links"]) == 2
    assert table["stragglers"] == {"host3": 1.5}
    assert table["links"][0]["latency"] == [5e-7, 5e-7]


@pytest.mark.parametrize("text", TEXTS)
def test_everything_is_drawn_at_a_place_of_its_own(text: str):
    made = topology(text)
    figure = fabric(DrawnLinks.of(made))
    servers = {node.server for node in made.nodes if node.server >= 0}
    outside = [node for node in made.nodes if node.server < 0]
    assert len(points(figure)) == len(servers) + len(outside)
    pairs = {frozenset(pair) for pair in zip(made.source.tolist(), made.target.tolist(), strict=True)}
    between = {
        frozenset(made.nodes[n].name if made.nodes[n].server < 0 else made.nodes[n].server for n in pair)
        for pair in pairs
    }
    assert drawn_lines(figure) == sum(len(pair) == 2 for pair in between)


@pytest.mark.parametrize(
    ("text", "above"), [("star:5@1Gbps", ["switch"]), ("leaf_spine:2x2@1Gbps", ["spine0", "spine1"])]
)
def test_names_of_the_highest_stand_above_their_links(text: str, above: list[str]):
    named = [trace for trace in fabric(DrawnLinks.of(topology(text))).data if "textposition" in trace]
    positions = {name: at for trace in named for name, at in zip(trace["text"], trace["textposition"], strict=True)}
    assert [name for name, at in positions.items() if at == "top center"] == above
    assert set(positions.values()) == {"top center", "bottom center"}


def test_faults_are_drawn_in_traces_of_their_own(ailing: Topology):
    names = {trace["name"]: trace for trace in fabric(DrawnLinks.of(ailing)).data if trace["mode"] == "lines"}
    for name in ("down", "slower than its kind", "shared with other traffic"):
        assert names[name]["x"].count(None) == 1
    stragglers = [trace for trace in fabric(DrawnLinks.of(ailing)).data if trace["name"] == "straggler"]
    assert len(stragglers[0]["x"]) == 1


def test_hovering_tells_rate_and_latency(ailing: Topology):
    texts = [text for trace in fabric(DrawnLinks.of(ailing)).data for text in trace.get("text", ())]
    (shared,) = [text for text in texts if "shared" in text]
    assert re.search(r"100 Gbps, 500 ns<br>2 of 2 links shared with other traffic: 10\.0 Gbps", shared)


def test_one_server_of_each_kind_is_opened():
    made = topology("dgx-h100:5")
    assert [many for _, many in different_servers(made)] == [5]
    slow = made.straggling({"s2.gpu1": 1.3})
    assert [many for _, many in different_servers(slow)] == [4, 1]
    figure = servers(DrawnLinks.of(slow))
    assert figure is not None
    parts = sum(node.server == 0 for node in made.nodes)
    assert sum(len(trace["x"]) for trace in figure.data if "hovertext" in trace) == 2 * parts
    assert len(points(figure)) == parts
    assert servers(DrawnLinks.of(topology("star:2@1Gbps"))) is None


@pytest.mark.parametrize("server", ["dgx-v100", "dgx-a100", "p3.16xlarge", "eflops", "eflops-baseline"])
def test_parts_of_a_server_do_not_hide_each_other(server: str):
    made = topology(f"{server}:2")
    figure = servers(DrawnLinks.of(made))
    assert figure is not None
    assert len(points(figure)) == sum(node.server == 0 for node in made.nodes)


def test_utilisation_paints_links():
    made = topology("star:4@1Gbps")
    used = np.zeros(made.links)
    used[made.between("host1", "switch")] = 1.0
    used[made.between("switch", "host2")] = 0.5
    lines = {t["name"]: t["x"].count(None) for t in fabric(DrawnLinks.of(made, used)).data if t["mode"] == "lines"}
    assert lines == {"idle": 2, "up to 50 % used": 1, "more than 95 % used": 1}
    assert "100.0%" in render(made, used)
    with pytest.raises(ConfigError, match="utilisation"):
        render(made, used[:3])


def test_the_page_is_one_file_that_fetches_nothing(ailing: Topology):
    html = render(ailing)
    assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)\s*=\s*[\"']?(https?:)?//", html)
    assert html.count("const Charts =") == 1
    assert "Inside the servers" not in html
    assert "2 links down" in html
    assert html == render(ailing)
    assert "Inside the servers" in render(topology("eflops:2"))


def test_two_thousand_nodes_are_drawn_one_by_one():
    made = topology("leaf_spine:60x32@1Gbps")
    figure = fabric(DrawnLinks.of(made))
    assert len(points(figure)) == len(made.nodes)
