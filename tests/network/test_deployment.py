"""A job on a topology: what suits it, what collectives take, how it is written, and that the optimum stays one."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.collective import build
from foretrain.errors import ConfigError
from foretrain.network import Cluster, cluster
from foretrain.network.collective_benchmark import exchange
from foretrain.network.collective_placement import arrange, choice_on, ranks_per_server, suited
from foretrain.network.deployment import Deployment
from foretrain.network.deployment_notation import deployment_of, single, topology
from foretrain.network.fluid import Fluid, run
from foretrain.network.program import endpoints, place
from foretrain.network.routing import reroute, router
from foretrain.network.topology.metrics import as_bigraph
from foretrain.simulation import simulate
from foretrain.units import COST_SHIFT, MICROSECOND, SECOND
from foretrain.workload import zoo

RATE = 12.5e9
WORK = zoo("alexnet", batch=32, device="V100")
BARE = {"step": 0, "overhead": 0}


def bare(text: str, collective: str, **fields) -> Deployment:
    """A deployment whose links and steps have no latency."""
    network = topology(text)
    return Deployment(network.changed(range(network.links), latency=0), collective, **(BARE | fields))


@pytest.mark.parametrize("name", ["ring", "halving_doubling"])
@pytest.mark.parametrize("hosts", [2, 3, 8, 13])
def test_what_a_collective_takes_on_a_star(name: str, hosts: int) -> None:
    found = bare(f"star:{hosts}@100Gbps", name).duration("all_reduce", 100_000_000)
    assert found == pytest.approx(2 * (hosts - 1) / hosts * 1e8 / RATE * SECOND, rel=1e-9)


def test_hdrm_on_a_bigraph_is_its_closed_form() -> None:
    """2 log2(P) α + 2 (P − 1)/P · S/B: every exchange has its links for itself; near partners are two hops apart."""
    place = Deployment(topology("bigraph:8x4@100Gbps,latency=0ns"), "hdrm", step=2 * MICROSECOND)
    size = 100_000_000
    expected = 2 * 5 * 2e6 + 2 * 31 / 32 * size / RATE * SECOND
    assert place.duration("all_reduce", size) == pytest.approx(expected, rel=1e-9)
    assert place.duration("reduce_scatter", size) == pytest.approx(expected / 2, rel=1e-9)


def test_auto_is_the_fastest_that_suits() -> None:
    network = topology("bigraph:4x2@100Gbps")
    auto = Deployment(network)
    for size in (1 << 10, 1 << 20, 1 << 28):
        names = suited("all_reduce", network, range(8))
        each = [Deployment(network, name).duration("all_reduce", size) for name in names]
        assert auto.duration("all_reduce", size) == min(each)
        assert auto.collective_at(size) in names


def test_what_suits_what() -> None:
    everywhere = {"ring", "halving_doubling", "circulant", "double_tree"}
    for text, ranks, more in (
        ("star:6@100Gbps", 6, set()),
        ("dgx-h100:1", 8, {"in_network"}),
        ("dgx-h100:2", 16, {"hierarchical"}),
        ("bigraph:4x2,server=eflops", 64, {"hierarchical", "hdrm"}),
    ):
        assert set(suited("all_reduce", topology(text), range(ranks))) == everywhere | more


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("star:4@100Gbps", "hdrm", "needs a BiGraph and not star"),
        ("star:4@100Gbps", "in_network", "needs a switch beside all ranks that reduces"),
        ("star:4@100Gbps", "hierarchical", "needs several servers of several ranks"),
        ("star:4@100Gbps", "rign", "'rign' is unknown; did you mean 'ring'"),
    ],
)
def test_what_does_not_suit_says_what_is_missing(text: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arrange(name, "all_reduce", topology(text), range(4))


def test_ranks_of_servers() -> None:
    network = topology("dgx-h100:2")
    members = Deployment(network).members
    assert ranks_per_server(network, np.array(members)) == 8
    assert ranks_per_server(network, np.array([0, 1, 8, 9])) == 2
    assert ranks_per_server(network, np.array([0, 8, 9])) == 1
    assert ranks_per_server(topology("star:4@100Gbps"), np.arange(4)) == 1


DEPLOYMENTS = cache(lambda text: Deployment(topology(text)))


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["star:5@100Gbps", "fat_tree:4@100Gbps", "bigraph:4x3@100Gbps", "dgx-a100:2"]),
    st.integers(1, 10**9),
)
def test_no_size_is_cheaper_per_byte_than_the_optimum_reckons(text: str, size: int) -> None:
    place = DEPLOYMENTS(text)
    assert place.duration("all_reduce", size) >= (size * place.cost.per_byte) >> COST_SHIFT


def test_between_powers_of_two_time_is_what_a_simulation_says() -> None:
    place = Deployment(topology("fat_tree:4@25Gbps"), "halving_doubling")
    for size in (3_000_000, 12_345_678):
        assert place.duration("all_reduce", size) == pytest.approx(place._exact("all_reduce", size), rel=5e-3)


@pytest.mark.parametrize(
    "text",
    [
        "dgx-a100:1",
        "dgx-h100:1",
        "dgx-h100:2",
        "dgx-h100:4",
        "dgx-v100:2",
        "dgx-b200:3",
        "gb200-nvl72:1",
        "gb300-nvl72:2,ranks=0-63+72-135",
    ],
)
@pytest.mark.parametrize("size", [1 << 12, 1 << 20, 1 << 24, 1 << 28])
def test_simulating_nccl_on_an_idle_network_takes_as_long_as_its_model_says(text: str, size: int) -> None:
    place = cluster(f"{text},collective=nccl")
    assert isinstance(place, Deployment)
    choice, name = choice_on(place.topology, place.members, place.device, "all_reduce", size)
    assert place.collective_at(size) == f"{name}, {choice.protocol}"
    assert place.duration("all_reduce", size) == pytest.approx(choice.time, rel=1e-6)


def test_a_ring_uses_every_nvlink_of_a_mesh_and_every_nic_of_a_server() -> None:
    """Measured with nccl-tests on a DGX-1 with V100: 130 GB/s; of its six links of 25 GB/s a ring gets all but one."""
    mesh = exchange(Deployment(topology("dgx-v100:1")), "all_reduce", 1 << 28, "ring")
    assert mesh.bandwidth == pytest.approx(125e9, rel=0.02)
    rails = exchange(Deployment(topology("dgx-h100:4")), "all_reduce", 1 << 28, "ring")
    assert rails.bandwidth > 6 * 50e9


@pytest.mark.parametrize("name", ["ring", "halving_doubling", "parameter_server", "circulant"])
@pytest.mark.parametrize("text", ["leaf_spine:3x3@10Gbps,oversubscription=2", "fat_tree:4@10Gbps,routing=adaptive"])
def test_no_schedule_beats_the_optimum_not_even_in_halves(text: str, name: str) -> None:
    for schedule in ("dear", "bytescheduler", "fifo"):
        run = simulate(WORK, f"{text},collective={name}", schedule, trace=False)
        assert run.iteration_time >= run.bound.time


def test_a_collective_without_halves_borrows_them() -> None:
    place = Deployment(topology("star:4@10Gbps"), "double_tree")
    auto = Deployment(topology("star:4@10Gbps"))
    assert place.duration("all_gather", 10**6) == auto.duration("all_gather", 10**6)
    assert simulate(WORK, place, "dear", trace=False).iteration_time > 0


def test_hdrm_stays_on_the_hosts_that_the_job_has() -> None:
    """Two jobs on the halves of all switches, each with a BiGraph of its own."""
    network = topology("bigraph:4x4@100Gbps")
    hosts = np.arange(16).reshape(4, 4)
    for ranks in (hosts[:, :2], hosts[:, 2:], hosts[[0, 2], :1], hosts[:1]):
        members = tuple(ranks.reshape(-1).tolist())
        arrangement = arrange("hdrm", "all_reduce", network, members)
        assert sorted(arrangement.ranks.tolist()) == list(members)
        found = exchange(Deployment(network, "hdrm", ranks=members), "all_reduce", 10**8)
        assert found.time == pytest.approx(found.least, rel=0.01)
    with pytest.raises(ConfigError, match="are not on equally many switches of both parts"):
        arrange("hdrm", "all_reduce", network, range(7))
    with pytest.raises(ConfigError, match="are not whole servers"):
        Deployment(topology("bigraph:4x2@25Gbps,server=eflops"), "hdrm", ranks=tuple(range(10)))


def test_a_bigraph_is_known_by_its_links() -> None:
    made = topology("bigraph:6x2@100Gbps")
    renamed = dataclasses.replace(made, name="ours")
    assert "hdrm" in suited("all_reduce", renamed, range(12))
    shape = as_bigraph(renamed)
    assert shape is not None
    assert shape.half == 3
    assert np.bincount(shape.switch).tolist() == [2] * 6
    for other in ("star:4", "leaf_spine:4x4", "fat_tree:4", "dragonfly:3x2x1", "torus:3x3"):
        assert as_bigraph(topology(f"{other}@1Gbps")) is None


def test_thousands_of_ranks_do_not_try_what_takes_minutes() -> None:
    place = Deployment(topology("dgx-h100:256"))
    assert place.collective_at(1 << 20) in ("halving_doubling", "hierarchical", "circulant", "double_tree")


def test_faults_show() -> None:
    network = topology("star:8@100Gbps")
    whole = Deployment(network, "ring").duration("all_reduce", 10**8)
    half = network.changed(network.between("host0", "switch"), rate=RATE / 2)
    assert Deployment(half, "ring").duration("all_reduce", 10**8) == pytest.approx(2 * whole, rel=0.01)
    busy = network.changed(network.between("host0", "switch"), background=RATE * 0.75)
    assert Deployment(busy, "ring").duration("all_reduce", 10**8) == pytest.approx(4 * whole, rel=0.01)
    assert Deployment(network.straggling({"host3": 1.5})).slowdown == 1.5
    assert Deployment(network.straggling({"host3": 1.5}), ranks=(0, 1, 2)).slowdown == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bigraph:8x4@100Gbps", ("auto", "ecmp", None, 32)),
        ("fat_tree:4@10Gbps,routing=spray,collective=ring,device=A100", ("ring", "spray", "A100", 16)),
        ("dgx-h100:2,collective=nccl", ("nccl", "ecmp", "H100", 16)),
        ("dgx-h200:1", ("auto", "ecmp", "H200", 8)),
        ("p3.16xlarge:1,collective=ring", ("ring", "ecmp", "V100", 8)),
        ("star:8@10Gbps,ranks=0-2+5", ("auto", "ecmp", None, 4)),
    ],
)
def test_notation(text: str, expected: tuple) -> None:
    place = cluster(text)
    assert isinstance(place, Deployment)
    assert (place.collective, place.routing, place.device, place.total_gpus) == expected
    assert cluster(place) is place
    assert str(place.total_gpus) in str(place)
    assert isinstance(cluster("dgx-h100:16"), Cluster)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bigraph:8x4@100Gbps,collective=hdmr", "'hdmr' is unknown; did you mean 'hdrm'"),
        ("star:4@100Gbps,collective=ring,collective=ring", "is said twice"),
        ("star:4@100Gbps,collective=nccl", "device: None does not say which GPU NCCL runs on"),
        ("star:4@100Gbps,ranks=0-9", "9 is no rank of the topology"),
        ("star:4@100Gbps,ranks=3-1", "runs backwards"),
        ("star:4@100Gbps,ranks=x", "is not a list of ranks"),
        ("star:4@100Gbps,ranks=1", "has nobody to exchange"),
        ("star:4@100Gbps,ranks=1+1", "has one twice"),
        ("star:4@100Gbps,seed=x", "is not a whole number"),
        ("star:4@100Gbps,device=Z80", "'Z80' is unknown"),
        ("star:4@100Gbps,routing=emcp", "did you mean 'ecmp'"),
        ("bigraph:8x4@100Gbps,overhead=5", "is not a time"),
    ],
)
def test_what_is_wrong_is_said(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cluster(text)


def test_changes_for_sweeps_and_advice() -> None:
    place = Deployment(topology("star:8@100Gbps"), "ring")
    size = 1 << 28
    assert place.scaled(2).duration("all_reduce", size) == pytest.approx(
        place.duration("all_reduce", size) / 2, rel=1e-2
    )
    assert place.changed("rate", 2 * RATE).cost == place.scaled(2).cost
    assert place.changed("workers", 4).total_gpus == 4
    assert place.changed("overhead", 7).overhead == 7
    assert place.without_latency().duration("all_reduce", 8) < 10**4
    with pytest.raises(ConfigError, match="are more than the job's 8 ranks"):
        place.changed("workers", 9)


def laid_out(text: str):
    found = cluster(text)
    assert isinstance(found, Cluster)
    return deployment_of(found)


def test_hosts_around_a_switch_take_as_long_as_the_formula() -> None:
    text = "4x1xV100@10Gbps,latency=10us"
    where, size = laid_out(text), 1 << 28
    ring = 2 * 3 / 4 * size / 1.25e9
    assert where.carried_by("ring").duration("all_reduce", size) / 1e12 == pytest.approx(ring, rel=1e-2)
    assert where.total_gpus == 4
    assert where.device == "V100"


def test_gpus_of_a_server_share_its_link_and_are_near_each_other() -> None:
    where, size = laid_out("2x8xA100@100Gbps").carried_by("ring"), 1 << 30
    assert where.total_gpus == 16
    # A ring over all ranks crosses each server's link once in each direction.
    assert where.duration("all_reduce", size) / 1e12 == pytest.approx(2 * 15 / 16 * size / 12.5e9, rel=0.02)


def test_lower_rate_counts_where_a_host_has_two() -> None:
    slow = laid_out("4x1xV100@10Gbps/5Gbps").carried_by("ring").duration("all_reduce", 1 << 28)
    assert slow == laid_out("4x1xV100@5Gbps").carried_by("ring").duration("all_reduce", 1 << 28)


def test_one_gpu_is_a_job_of_its_own() -> None:
    where = single("h100")
    assert where.total_gpus == 1
    assert str(where) == "1 H100"
    assert where.carried_by("nccl").total_gpus == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [("4x1xV100@10Gbps,ps=2", "has parameter servers"), ("4x1@10Gbps", "does not say which GPUs it has")],
)
def test_what_a_script_cannot_run_on(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        laid_out(text)


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
