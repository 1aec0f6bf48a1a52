import numpy as np
import pytest

from foretrain.errors import ConfigError
from foretrain.network.routing import Ecmp, Static, reroute, router
from tests.network.routing.networks import all_pairs, check_paths, leaf_spine


def names(topology, links):
    return [topology.nodes[topology.source[links[0]]].name, *(topology.nodes[n].name for n in topology.target[links])]


def flow(topology, source, target, connection=0):
    return tuple(np.array([i], np.int32) for i in (topology.node(source), topology.node(target), connection))


def test_listed_pairs_take_their_path_and_others_the_fallback():
    topology = leaf_spine()
    listed = ["h0", "leaf0", "spine3", "leaf1", "h4"]
    static = router(topology, "static", table={("h0", "h4"): listed}, fallback="ecmp", seed=3)
    sources, targets, connections = all_pairs(topology, connections=2)
    paths = static.paths(sources, targets, connections)
    check_paths(topology, paths, sources, targets)
    plain = Ecmp(topology, seed=3).paths(sources, targets, connections)
    for i in range(len(paths)):
        if (sources[i], targets[i]) == (topology.node("h0"), topology.node("h4")):
            assert names(topology, paths.of(i)) == listed
        else:
            assert np.array_equal(paths.of(i), plain.of(i))


def test_a_connection_goes_before_its_pair():
    topology = leaf_spine()
    over = {spine: ["h0", "leaf0", spine, "leaf1", "h4"] for spine in ("spine1", "spine2")}
    static = Static(topology, {("h0", "h4"): over["spine1"], ("h0", "h4", 7): over["spine2"]})
    assert names(topology, static.paths(*flow(topology, "h0", "h4", 7)).of(0)) == over["spine2"]
    assert names(topology, static.paths(*flow(topology, "h0", "h4", 8)).of(0)) == over["spine1"]


def test_a_path_by_links_tells_parallel_ones_apart_and_may_be_a_detour():
    topology = leaf_spine(leaves=3, cables=2)
    second = [topology.between(a, b)[1] for a, b in (("leaf0", "spine0"), ("spine0", "leaf1"))]
    links = [topology.between("h0", "leaf0")[0], *second, topology.between("leaf1", "h4")[0]]
    assert Static(topology, {("h0", "h4"): links}).paths(*flow(topology, "h0", "h4")).links.tolist() == links
    detour = ["h0", "leaf0", "spine0", "leaf2", "spine1", "leaf1", "h4"]
    assert len(Static(topology, {("h0", "h4"): detour}).paths(*flow(topology, "h0", "h4")).links) == 6


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["h0", "leaf0", "leaf1", "h4"], r"table\[h0, h4\].link: 'leaf0 -> leaf1' does not exist; leaf0 is linked to"),
        (["h0", "leaf0", "spine0", "leaf1"], "'leaf1' is where the path ends, not h4"),
        (["leaf0", "spine0", "leaf1", "h4"], r"'leaf0 -> spine0' does not go on from h0"),
        (["h0", "leaf0", "spine9", "leaf1", "h4"], "'spine9' is unknown; did you mean 'spine"),
        ([], "is not a path"),
        ([10**6], "is not a path"),
        (["h0", "leaf0", "h1", "leaf0", "spine0", "leaf1", "h4"], "leaves h1, which forwards nothing"),
    ],
)
def test_what_is_no_path_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        Static(leaf_spine(), {("h0", "h4"): given})


def test_a_path_over_a_link_that_is_down_is_refused_or_dropped_after_the_failure():
    topology = leaf_spine()
    table = {("h0", "h4"): ["h0", "leaf0", "spine3", "leaf1", "h4"]}
    down = topology.changed(topology.between("leaf0", "spine3"), up=False)
    with pytest.raises(ConfigError, match="'leaf0 -> spine3' is down"):
        Static(down, table)
    static, flows = Static(topology, table, fallback=Ecmp(topology)), flow(down, "h0", "h4")
    moved, after = reroute(static, static.paths(*flows), *flows, down)
    assert moved.tolist() == [0]
    check_paths(down, after, *flows[:2])


def test_a_wrong_pair_or_fallback_and_a_flow_that_is_not_listed_are_refused():
    topology = leaf_spine()
    with pytest.raises(ConfigError, match="'h99' is unknown"):
        Static(topology, {("h0", "h99"): ["h0", "leaf0"]})
    with pytest.raises(ConfigError, match="is not a pair of names"):
        Static(topology, {("h0",): ["h0"]})  # pyright: ignore
    with pytest.raises(ConfigError, match="is not the topology of the table"):
        Static(topology, {}, fallback=router(topology, "spray"))
    with pytest.raises(ConfigError, match="'h1 -> h2' is not listed"):
        router(topology, "static", table={}, fallback=None).paths(*flow(topology, "h1", "h2"))
