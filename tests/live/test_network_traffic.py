"""The network as the executor sees it: closed forms, and everything in flight against one simulation of all of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.collective import Operation
from foretrain.collective.nccl.generation import GPUS
from foretrain.errors import ConfigError
from foretrain.live.folding import Folding, Group
from foretrain.live.network_traffic import NetworkTraffic
from foretrain.network import cluster
from foretrain.network.collective_placement import choice_on
from foretrain.network.deployment import Deployment
from foretrain.network.fidelity import Fidelity, Level
from foretrain.network.fluid import Fluid
from foretrain.simulation.world import VirtualWorld
from foretrain.units import MICROSECOND, MILLISECOND, SECOND, Time

SERVERS = "dgx-h100:4,collective=nccl"
LEVELS: tuple[Level, ...] = ("ideal", "fluid", "packet")
SMALL = "leaf_spine:2x4@10Gbps,oversubscription=4,collective=ring,step=2us"


class Start(NamedTuple):
    """A collective, and when it begins."""

    at: Time
    operation: str
    size: int
    group: Group
    splits: Any = None


def place(text: str) -> Deployment:
    found = cluster(text)
    assert isinstance(found, Deployment)
    return found


def made(where: Deployment, folding: Folding | None = None) -> tuple[VirtualWorld, NetworkTraffic]:
    world = VirtualWorld()
    return world, NetworkTraffic(world, where, folding or Folding.all_live(len(where.members)))


def ends(where: Deployment, starts: Sequence[Start], folding: Folding | None = None) -> list[Time]:
    """When each of ``starts`` is done."""
    return run(*made(where, folding), starts)


def run(world: VirtualWorld, traffic: NetworkTraffic, starts: Sequence[Start]) -> list[Time]:
    found = [0] * len(starts)
    for index, (at, *what) in enumerate(starts):
        world.call_at(at, partial(traffic.collective, *what, lambda index=index: _note(found, index, world)))
    world.run()
    return found


def message_ends(
    where: Deployment, transfers: Sequence[tuple[int, int, int]], folding: Folding | None = None
) -> list[Time]:
    (world, traffic), found = made(where, folding), [0] * len(transfers)
    traffic.messages(transfers, [partial(_note, found, index, world) for index in range(len(transfers))])
    world.run()
    return found


def _note(found: list[Time], index: int, world: VirtualWorld) -> None:
    found[index] = world.now()


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("group", [tuple(range(8)), tuple(range(32)), tuple(range(0, 32, 8))])
@pytest.mark.parametrize("size", [1 << 12, 1 << 28])
def test_a_collective_alone_takes_as_long_as_nccl(operation: Operation, group: Group, size: int) -> None:
    where = place(SERVERS)
    alone = dataclasses.replace(where, ranks=group, _memo={}).duration(operation, size)
    assert ends(where, [Start(0, operation, size, group)]) == [pytest.approx(alone, rel=1e-3)]


@pytest.mark.parametrize("operation", ["broadcast", "reduce"])
@pytest.mark.parametrize("size", [1 << 12, 1 << 30])
def test_a_broadcast_is_a_pipeline(operation: str, size: int) -> None:
    where, group = place(SERVERS), tuple(range(32))
    choice, _ = choice_on(where.topology, group, "H100", "broadcast", size)
    assert ends(where, [Start(0, operation, size, group)]) == [pytest.approx(choice.time, rel=1e-6)]


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("collective", ["ring", "halving_doubling", "auto"])
def test_other_collectives_are_those_of_the_deployment(operation: Operation, collective: str) -> None:
    where = place(SMALL).carried_by(collective)
    group = (0, 5, 2, 7)
    alone = dataclasses.replace(where, ranks=group, _memo={}).duration(operation, 1 << 22)
    assert ends(where, [Start(5, operation, 1 << 22, group)]) == [pytest.approx(5 + alone, abs=2)]


def test_a_broken_link_is_not_calibrated_away() -> None:
    """A cable at half its rate halves what a ring over servers gets, less what NCCL leaves of the links anyway."""
    where = place(SERVERS)
    nodes = where.topology.nodes
    ends_ = zip(where.topology.source.tolist(), where.topology.target.tolist(), strict=True)
    leaving = [link for link, (a, b) in enumerate(ends_) if nodes[a].kind == "nic" and nodes[b].kind == "switch"]
    slow = where.topology.changed(leaving[:1], rate=float(where.topology.rate[leaving[0]] / 2))
    start = [Start(0, "all_gather", 1 << 30, tuple(range(0, 32, 8)))]
    fast, halved = ends(where, start)[0], ends(dataclasses.replace(where, topology=slow, _memo={}), start)[0]
    assert 1.5 * fast < halved < 2.1 * fast


def test_those_that_share_no_link_do_not_disturb_each_other() -> None:
    where = place(SERVERS)
    groups = [tuple(range(at, at + 8)) for at in range(0, 32, 8)]
    alone = ends(where, [Start(0, "all_reduce", 1 << 26, groups[0])])[0]
    starts = [Start(i * MICROSECOND, "all_reduce", 1 << 26, group) for i, group in enumerate(groups)]
    assert ends(where, starts) == [alone + i * MICROSECOND for i in range(4)]


def always_joint(where: Deployment, starts: Sequence[Start]) -> list[Time]:
    """All in one simulation from the beginning, each as the deployment of its group makes it."""
    fluid = Fluid(where.capacity)
    handles = {}
    for index in sorted(range(len(starts)), key=lambda index: starts[index].at):
        at, operation, size, group, _ = starts[index]
        members = dataclasses.replace(where, ranks=group, _memo={})
        handles[index] = fluid.add(members.program(cast(Operation, operation), size, at), at)
    fluid.advance()
    return [cast(int, handles[index].end) for index in range(len(starts))]


def test_two_that_share_links_are_simulated_together() -> None:
    where = place(SMALL)
    starts = [
        Start(0, "all_gather", 1 << 24, (0, 1, 4, 5)),
        Start(3 * MILLISECOND, "reduce_scatter", 1 << 24, (2, 3, 6, 7)),
    ]
    alone = [ends(where, [start])[0] for start in starts]
    together = ends(where, starts)
    assert together == [pytest.approx(end, abs=2) for end in always_joint(where, starts)]
    assert min(b - a for a, b in zip(alone, together, strict=True)) > MILLISECOND


GROUPS: list[Group] = [(0, 1, 2, 3), (4, 5, 6, 7), (0, 4), (1, 5, 2, 6), (3, 7), (0, 1, 2, 3, 4, 5, 6, 7)]
one_start = st.builds(
    Start,
    st.integers(0, 40 * MILLISECOND),
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]),
    st.sampled_from([1 << 10, 3_000_000, 1 << 24]),
    st.sampled_from(GROUPS),
    st.none(),
)


@given(st.lists(one_start, min_size=1, max_size=8))
@settings(max_examples=25, deadline=None)
def test_simulating_only_what_meets_is_simulating_everything(starts: list[Start]) -> None:
    """In any order of arrivals, and the second time, from memory, as the first."""
    where = place(SMALL)
    starts.sort(key=lambda start: start.at)
    world, traffic = made(where)
    first = run(world, traffic, starts)
    assert first == [pytest.approx(end, abs=3) for end in always_joint(where, starts)]
    later = max(first) + SECOND
    again = run(world, traffic, [start._replace(at=start.at + later) for start in starts])
    assert again == [end + later for end in first]
    # What is remembered is left where one of them does not come.
    fewer, later = starts[: len(starts) // 2], 2 * later
    less = run(world, traffic, [start._replace(at=start.at + later) for start in fewer])
    assert less == [pytest.approx(end + later, abs=3) for end in always_joint(where, fewer)]


@pytest.mark.parametrize(("text", "local"), [(SERVERS, 8), (SMALL, 4)])
def test_groups_that_are_represented_contend_as_if_they_were_live(text: str, local: int) -> None:
    """The rings of all GPUs of a server at once, over rails and over an oversubscribed spine."""
    where = place(text)
    world = len(where.members)
    groups = [tuple(range(first, world, local)) for first in range(local)]
    folding = Folding.discover(world, groups, [1] * local, [])
    assert folding.live == (0,)
    for operation in ("all_reduce", "all_to_all", "gather"):
        starts = [Start(0, operation, 1 << 24, group) for group in groups]
        folded, explicit = ends(where, starts[:1], folding), max(ends(where, starts))
        assert folded == [pytest.approx(explicit, abs=2)]
        if text == SMALL:
            assert folded[0] > 1.5 * ends(where, starts[:1])[0]
            assert operation != "all_reduce" or explicit == pytest.approx(max(always_joint(where, starts)), abs=2)


def test_messages() -> None:
    """Inside a server by NVLink, between servers by the NIC; two over one NIC share it."""
    where, size = place(SERVERS), 1 << 28
    near, far = message_ends(where, [(0, 1, size)])[0], message_ends(where, [(0, 8, size)])[0]
    assert 320e9 < size / near * SECOND < 400e9
    assert 45e9 < size / far * SECOND < 50e9
    curve = GPUS["H100"].generation.direct
    assert message_ends(where, [(0, 1, 1)])[0] == pytest.approx(curve.launch + curve.hop, rel=0.01)
    assert message_ends(where, [(0, 8, size), (0, 16, size)]) == [pytest.approx(2 * far, rel=0.02)] * 2
    assert message_ends(where, [(0, 8, size), (8, 0, size)]) == [far, far]
    # Over the proxy in its own server to the receiver's rail, whose NIC another then has to share.
    assert message_ends(where, [(0, 9, size)]) == [pytest.approx(far, rel=0.01)]
    assert message_ends(where, [(0, 9, size), (1, 9, size)]) == [pytest.approx(2 * far, rel=0.02)] * 2
    assert 0 < message_ends(where, [(3, 3, size)])[0] < 20 * MICROSECOND


def test_adaptive_routing_gives_exchanges_that_begin_apart_ways_apart() -> None:
    """Each of 4 hosts of a leaf is in a group with one of the other leaf's; 4 spines have room for all."""
    where = place("leaf_spine:2x4@10Gbps,spines=4,collective=ring,step=2us,routing=adaptive")
    each = [Start(index, "all_reduce", 10**7, (index, 4 + index)) for index in range(4)]
    (alone,) = ends(where, each[:1])
    assert ends(where, each) == [alone + index for index in range(4)]


def test_represented_pipelines_send_at_the_same_moment() -> None:
    where = place(SMALL)
    groups: list[Group] = [(rank, rank + 4) for rank in range(4)]
    folding = Folding.discover(8, groups, [1] * 4, [(0, 4, (0, 4))])
    found = message_ends(where, [(0, 4, 1 << 24)], folding)
    explicit = message_ends(where, [(rank, rank + 4, 1 << 24) for rank in range(4)])
    assert found == [pytest.approx(max(explicit), abs=2)]
    assert found[0] > 1.5 * message_ends(where, [(0, 4, 1 << 24)])[0]


def test_splits_of_an_all_to_all() -> None:
    where, group, block = place(SERVERS), tuple(range(0, 32, 8)), 1 << 22
    even = ends(where, [Start(0, "all_to_all", 4 * block, group)])[0]
    assert ends(where, [Start(0, "all_to_all", 4 * block, group, (block,) * 4)]) == [pytest.approx(even, abs=2)]
    rows = {0: (block,) * 4, 8: (0, 4 * block, 0, 0)}
    assert ends(where, [Start(0, "all_to_all", 4 * block, group, rows)])[0] <= even
    nothing = ends(where, [Start(0, "all_to_all", 4 * block, group, (0, 0, 0, 0))])[0]
    assert 0 <= nothing < MILLISECOND
    # All send everything to one, whose NIC is the limit.
    hot = ends(where, [Start(0, "all_to_all", 4 * block, group, (4 * block, 0, 0, 0))])[0]
    assert 3 * even < hot < 4.5 * even
    with pytest.raises(ConfigError, match="one per rank"):
        ends(where, [Start(0, "all_to_all", 4 * block, group, (block, block))])


@pytest.mark.parametrize("servers", [2, 40])
def test_a_shift_told_by_one_is_a_shift_of_all(servers: int) -> None:
    """As context parallelism rotates its keys; also among more ranks than have a flow for every pair."""
    where, size = place(f"dgx-h100:{servers},collective=nccl"), 1 << 26
    group = tuple(range(8 * servers))
    folding = Folding.discover(len(group), [group], [1], [])
    rows = {i: tuple(size * (j == (i + 1) % len(group)) for j in group) for i in group}
    folded = ends(where, [Start(0, "all_to_all", size, group, {0: rows[0]})], folding)
    assert folded == ends(where, [Start(0, "all_to_all", size, group, rows)])
    # Each NIC carries one of the messages, on its rail or by its server's proxy.
    assert folded == [pytest.approx(message_ends(where, [(7, 8, size)])[0], rel=0.1)]


def test_very_many_ranks_of_an_all_to_all_send_to_some() -> None:
    """Sampled pairs take as long as NCCL's model says of all of them."""
    where = place("dgx-h100:48,collective=nccl")
    group = tuple(range(384))
    choice, _ = choice_on(where.topology, group, "H100", "all_to_all", 1 << 26)
    assert ends(where, [Start(0, "all_to_all", 1 << 26, group)]) == [pytest.approx(choice.time, rel=0.1)]


@pytest.mark.parametrize("operation", ["gather", "scatter"])
def test_gather_and_scatter_are_limited_by_the_root(operation: str) -> None:
    where, group, size = place(SERVERS), tuple(range(0, 32, 8)), 1 << 28
    one = message_ends(where, [(0, 8, 3 * size // 4)])[0]
    assert ends(where, [Start(0, operation, size, group)]) == [pytest.approx(one, rel=0.05)]


def test_what_has_no_bytes_has_latency_alone() -> None:
    where, group = place(SERVERS), tuple(range(32))
    barrier = ends(where, [Start(0, "barrier", 0, group)])[0]
    assert barrier == pytest.approx(ends(where, [Start(0, "all_reduce", 4, group)])[0], rel=1e-3)
    assert 0 < ends(where, [Start(0, "all_reduce", 1 << 30, (3,))])[0] < 20 * MICROSECOND
    assert 0 < ends(where, [Start(0, "broadcast", 0, group)])[0] < MILLISECOND
    assert ends(place(SMALL), [Start(0, "barrier", 0, tuple(range(8)))]) == [2 * 3 * 2 * MICROSECOND]


def test_joined_steps_of_a_long_ring_take_as_long() -> None:
    """Half a million steps in flight: not each is simulated, and disturbed or not they share as before."""
    where = place("star:512@10Gbps,collective=ring,step=2us")
    ring = Start(0, "all_reduce", 1 << 26, tuple(range(512)))
    assert ends(where, [ring]) == [pytest.approx(where.duration("all_reduce", 1 << 26), rel=1e-6)]
    pair = Start(MILLISECOND, "all_gather", 1 << 24, (0, 1))
    alone = ends(where, [pair])[0] - MILLISECOND
    _, end = ends(where, [ring, pair])
    assert 1.2 * alone < end - MILLISECOND < 2.2 * alone


def test_links_remember_what_they_carried() -> None:
    where = place(SERVERS)
    groups = [tuple(range(first, 32, 8)) for first in range(8)]
    folding = Folding.discover(32, groups, [1] * 8, [])
    world, traffic = made(where, folding)
    run(world, traffic, [Start(at, "all_gather", 1 << 20, groups[0]) for at in (0, SECOND)])
    topology = where.network
    gpus = np.isin(topology.source, topology.ranks)
    # Each rank sends three of four blocks, twice; those of the other seven GPUs of a server as well.
    assert traffic.carried()[gpus].sum() == pytest.approx(2 * 32 * 3 / 4 * (1 << 20))
    assert traffic.mark().sum() == traffic.carried().sum()
    assert traffic.mark().sum() == 0


def test_groups_that_become_known_later_are_simulated_with_it() -> None:
    where = place(SMALL)
    groups = [tuple(range(first, 8, 4)) for first in range(4)]
    folding = Folding.discover(8, [], [], [])
    world, traffic = made(where, folding)
    start = Start(0, "all_reduce", 1 << 24, groups[0])
    before = run(world, traffic, [start])[0]
    for group in groups:
        folding.add(group, 1)
    traffic.regrouped()
    later = run(world, traffic, [start._replace(at=SECOND)])[0] - SECOND
    assert later > 1.5 * before


def test_inputs_that_disagree() -> None:
    with pytest.raises(ConfigError, match="nproc: 64 is not the cluster's 32 ranks"):
        ends(place(SERVERS), [], Folding.all_live(64))
    with pytest.raises(ConfigError, match="did you mean 'all_reduce'"):
        ends(place(SERVERS), [Start(0, "allreduce", 1, (0, 1))])


def test_exchanges_contend_as_closely_as_asked() -> None:
    where, half = place(SMALL), 1 << 19
    starts = [
        Start(0, "all_reduce", 2 * half, (0, 1, 4, 5)),
        Start(50 * MICROSECOND, "all_reduce", half, (2, 3, 6, 7)),
        Start(60 * MICROSECOND, "all_gather", half, (0, 1)),
    ]
    found = [ends(where.simulated(Fidelity(level)), starts) for level in LEVELS]
    ideal, fluid, packet = ([end - start.at for start, end in zip(starts, each, strict=True)] for each in found)
    assert all(one <= other for one, other in zip(ideal, fluid, strict=True))
    assert ideal[0] < 0.8 * fluid[0]
    # A window that begins where queues are marked already is long in getting its share.
    assert all(one < other < 4 * one for one, other in zip(fluid, packet, strict=True))


def test_what_is_too_much_for_the_budget_makes_a_fluid_of_what_it_meets() -> None:
    where, told = place(SMALL), list[str]()
    starts = [
        Start(0, "all_reduce", 1 << 16, (0, 1, 4, 5)),
        Start(50 * MICROSECOND, "all_reduce", 1 << 22, (2, 3, 6, 7)),
    ]

    def of(fidelity: Fidelity) -> list[Time]:
        world = VirtualWorld()
        simulated = where.simulated(fidelity)
        return run(world, NetworkTraffic(world, simulated, Folding.all_live(8), told.append), starts)

    fluid, packet = of(Fidelity("fluid")), of(Fidelity("packet"))
    assert of(Fidelity("auto", budget=1e9)) == packet
    assert told == []
    assert of(Fidelity("auto", budget=0)) == fluid
    assert len(told) == 1
    assert "such ones are fluids" in told[0]
    speed = "foretrain.live.comm_pattern.speed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, lambda *_: 1000.0)
        mixed = of(Fidelity("auto", budget=3.0))
    # The first is within the budget until the second comes, which is not.
    assert mixed[1] == fluid[1]
    assert mixed[0] in (fluid[0], packet[0])
