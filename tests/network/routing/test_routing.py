import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import ConfigError
from foretrain.network import routing
from foretrain.network.routing import Adaptive, Ecmp, Shortest, Spray, Static, link_load, reroute, router
from tests.network.routing.networks import all_pairs, check_paths, fat_tree, leaf_spine


@given(st.integers(0, 10**6), st.sampled_from(["shortest", "ecmp", "adaptive"]), st.integers(1, 6))
def test_exactly_the_flows_over_failed_links_move(seed, policy, failures):
    topology = fat_tree(4)
    draw = np.random.default_rng(seed)
    between = np.flatnonzero((topology.source >= 16) & (topology.target >= 16))
    try:
        changed = topology.changed(draw.choice(between, failures, replace=False), up=False)
    except ConfigError:
        return  # not connected any more
    flows = all_pairs(topology)
    chosen = router(topology, policy, seed=seed)
    before = chosen.paths(*flows)
    moved, after = reroute(chosen, before, *flows, changed)
    hit = [i for i in range(len(before)) if not changed.up[before.of(i)].all()]
    assert moved.tolist() == hit
    check_paths(changed, after, flows[0][moved], flows[1][moved])
    again, none = reroute(
        chosen,
        before.gather(np.setdiff1d(np.arange(len(before)), moved)),
        *(np.delete(column, moved) for column in flows),
        changed,
    )
    assert len(again) == len(none) == 0


def test_under_ecmp_a_flow_moves_to_where_a_new_one_would_go():
    topology = leaf_spine()
    flows = all_pairs(topology, connections=2)
    before = Ecmp(topology, seed=1).paths(*flows)
    changed = topology.changed(topology.between("leaf0", "spine1"), up=False)
    moved, after = reroute(Ecmp(topology, seed=1), before, *flows, changed)
    assert np.array_equal(after.links, Ecmp(changed, seed=1).paths(*flows).gather(moved).links)


def test_under_adaptive_routing_flows_move_to_where_the_others_are_not():
    topology = leaf_spine(leaves=2, spines=4, hosts=4)
    flows = np.arange(4, dtype=np.int32), np.arange(4, 8, dtype=np.int32), np.zeros(4, np.int32)
    before = Adaptive(topology).paths(*flows)
    spares = leaf_spine(leaves=2, spines=4, hosts=4)
    changed = spares.changed(spares.between("leaf0", "spine0"), up=False)
    moved, after = reroute(Adaptive(topology), before, *flows, changed)
    assert len(moved) == 1
    kept = before.gather(np.setdiff1d(np.arange(4), moved))
    load = link_load(kept, changed) + link_load(after, changed)
    assert load.max() == 2
    assert sorted(load[changed.between("leaf0", f"spine{i}")][0] for i in range(4)) == [0, 1, 1, 2]


def test_a_bundle_that_lost_a_link_keeps_its_flows_and_one_that_lost_all_does_not():
    topology = fat_tree(4)
    spray = Spray(topology)
    flows = all_pairs(spray.topology)
    before = spray.paths(*flows)
    one = topology.changed(topology.between("edge0", "agg0"), up=False)
    assert len(reroute(spray, before, *flows, one)[0]) == 0
    assert spray.on(one).topology.rate[spray.topology.between("edge0", "pod0")] == topology.rate[0]
    both = dataclasses.replace(one, up=one.up & ~np.isin(np.arange(one.links), one.between("edge0", "agg1")))
    with pytest.raises(ConfigError, match="went over edge0 -> pod0, which is down, and has no way left"):
        reroute(spray, before, *flows, dataclasses.replace(both, ranks=both.ranks[2:]))


def test_whoever_has_no_way_left_is_named_with_the_link():
    topology = leaf_spine()
    flows = all_pairs(topology)
    before = Shortest(topology).paths(*flows)
    up = topology.up.copy()
    up[topology.between("leaf0", "h1")] = False
    with pytest.raises(ConfigError) as caught:
        reroute(Shortest(topology), before, *flows, dataclasses.replace(topology, up=up))
    message = str(caught.value)
    assert "'h0 -> h1' went over leaf0 -> h1, which is down, and has no way left (nor have 14 other pairs)" in message
    assert "set a link up again" in message


def test_what_does_not_belong_together_is_refused():
    topology = leaf_spine()
    flows = all_pairs(topology)
    before = Shortest(topology).paths(*flows)
    with pytest.raises(ConfigError, match="has other links"):
        reroute(Shortest(topology), before, *flows, leaf_spine(spines=5))
    with pytest.raises(ConfigError, match="are not one per path"):
        reroute(Shortest(topology), before, flows[0][:3], flows[1], flows[2], topology)


def test_each_name_is_a_policy():
    topology = leaf_spine()
    made = {
        name: type(router(topology, name, table={} if name == "static" else None))
        for name in ("shortest", "ecmp", "static", "spray", "adaptive")
    }
    assert [*made.values()] == [Shortest, Ecmp, Static, Spray, Adaptive]
    assert isinstance(router(topology), Ecmp)


def test_options_reach_their_policy():
    topology = leaf_spine()
    ecmp = router(topology, seed=3, polarised=True)
    assert isinstance(ecmp, Ecmp)
    assert (ecmp.seed, ecmp.polarised) == (3, True)
    static = router(topology, "static", table={}, fallback="adaptive", load=np.ones(topology.links))
    assert isinstance(static, Static)
    assert isinstance(static.fallback, Adaptive)
    assert static.fallback.load.all()


def test_a_name_that_is_nearly_right_is_said():
    with pytest.raises(ConfigError, match=r"routing: 'ecpm' is unknown; did you mean 'ecmp'\?"):
        router(leaf_spine(), "ecpm")


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("shortest", {"polarised": True}, "polarised: 'shortest' does not have this option"),
        ("ecmp", {"table": {}}, "table: 'ecmp' does not have this option, which is one of static"),
        ("ecmp", {"load": np.ones(3)}, "one of adaptive"),
        ("static", {}, "lists no paths"),
        ("static", {"table": {}, "fallback": "static"}, "is the policy itself"),
        ("static", {"table": {}, "fallback": "adaptiv"}, "did you mean 'adaptive'"),
    ],
)
def test_options_of_other_policies_are_refused(policy, options, message):
    with pytest.raises(ConfigError, match=message):
        router(leaf_spine(), policy, **options)


def test_no_function_hides_a_module():
    for name in routing.__all__:
        assert not hasattr(getattr(routing, name), "__path__")
        assert getattr(routing, name).__module__.split(".")[-1] != name
