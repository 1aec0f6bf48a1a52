"""Collectives on fabrics: closed forms, lower bounds whatever the routing, and links that fail under way."""

from __future__ import annotations

import numpy as np
import pytest

from foretrain.collective import build
from foretrain.errors import ConfigError, StallError
from foretrain.network.fluid import Fluid, run
from foretrain.network.program import endpoints, place
from foretrain.network.routing import reroute, router
from foretrain.network.topology.notation import topology
from foretrain.units import SECOND

RATE = 12.5e9
FABRICS = ["star:8", "fat_tree:4", "leaf_spine:4x4,oversubscription=2", "bigraph:4x4", "torus:3x3", "dragonfly:3x2x1"]
COLLECTIVES = ["ring", "halving_doubling", "circulant", "double_tree", "direct", "pairwise"]


@pytest.mark.parametrize("policy", ["shortest", "ecmp", "adaptive"])
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("fabric", FABRICS)
def test_no_collective_is_faster_than_its_ports_and_its_depth(fabric: str, name: str, policy: str) -> None:
    head, _, options = fabric.partition(",")
    network = topology(f"{head}@100Gbps" + (f",{options}" if options else ""))
    routes = router(network, policy)
    ranks = len(network.ranks)
    plan = build(name, "all_to_all" if name in ("direct", "pairwise") else "all_reduce", ranks)
    program = place(plan, 10_000_000, routes)
    end = run(program, network.capacity).finish.max()
    ports = np.bincount(network.source, network.capacity, len(network.nodes))[network.ranks]
    assert end >= (plan.sent(10_000_000)[:ranks] / ports).max() * SECOND * (1 - 1e-9)
    assert end >= program.latency.min() * (1 - 1e-9)


def test_transfers_of_one_connection_share_their_path() -> None:
    network = topology("fat_tree:4@100Gbps")
    program = place(build("halving_doubling", "all_reduce", 16), 1e6, router(network, "ecmp"))
    plan = build("halving_doubling", "all_reduce", 16)
    seen: dict[tuple[int, int], list[int]] = {}
    for flow in range(plan.transfers):
        pair = int(plan.source[flow]), int(plan.target[flow])
        assert seen.setdefault(pair, program.paths.of(flow).tolist()) == program.paths.of(flow).tolist()


def test_latency_is_that_of_the_wires_and_of_a_step() -> None:
    network = topology("star:4@100Gbps,latency=300ns")
    plan = build("ring", "all_reduce", 4)
    assert set(place(plan, 1e6, router(network), step_latency=1000).latency) == {601_000.0}
    assert set(place(plan, 1e6, router(network), step_latency=1000, wire_latency=False).latency) == {1000.0}


def test_flows_over_a_link_that_fails_go_another_way_and_nothing_is_lost() -> None:
    network = topology("leaf_spine:2x4@100Gbps,spines=4")
    routes = router(network, "ecmp")
    plan = build("ring", "all_reduce", 8)
    program = place(plan, 10**9, routes)
    whole = run(program, network.capacity).end
    assert whole is not None

    used = int(program.paths.of(3)[1])
    nodes = [network.nodes[node].name for node in (network.source[used], network.target[used])]
    broken = network.changed(network.between(nodes[0], nodes[1]), up=False)
    fluid = Fluid(network.capacity)
    handle = fluid.add(program)
    fluid.pass_to(whole // 2)
    fluid.set_capacity([used], 0)
    flows, paths = reroute(routes, program.paths, *endpoints(plan, network), broken)
    assert 3 in flows
    fluid.reroute(handle, flows, paths)
    fluid.advance()
    assert handle.end is not None
    assert handle.end >= whole * (1 - 1e-9)
    assert not np.isin(paths.links, used).any()


def test_without_another_way_who_waits_is_said() -> None:
    network = topology("star:4@100Gbps")
    fluid = Fluid(network.capacity, name=network.link_name)
    fluid.add(place(build("ring", "all_reduce", 4), 10**9, router(network)))
    fluid.pass_to(10**9)
    fluid.set_capacity(network.between("host2", "switch"), 0)
    with pytest.raises(StallError, match="wait for host2 -> switch, which is down"):
        fluid.advance()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": [0, 1, 2]}, "ranks: 3 places do not hold a plan of 4 ranks"),
        ({"ranks": [0, 1, 2, 9]}, "has 4 ranks and cannot hold 4"),
        ({"helpers": [1]}, "helpers: .* are not the 0 of this plan"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place(build("ring", "all_reduce", 4), 1e6, router(topology("star:4@100Gbps")), **arguments)


def test_a_plan_larger_than_the_topology_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 4 ranks and cannot hold 5"):
        place(build("ring", "all_reduce", 5), 1e6, router(topology("star:4@100Gbps")))
