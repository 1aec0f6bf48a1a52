"""EFLOPS (HPCA'20): what its server, its fabric and its collective are worth, where it is known exactly."""

import numpy as np
import pytest

from foretrain.collective import build, flows_on_links, hdrm_mapping
from foretrain.network.fabrics.bigraph import bigraph
from foretrain.network.fabrics.star import star
from foretrain.network.fluid import Fluid, run
from foretrain.network.program import Paths, Program, joined, place
from foretrain.network.routing import Ecmp, Shortest
from foretrain.network.servers import PCIeTree
from foretrain.network.servers.eflops import NIC, eflops, eflops_baseline
from foretrain.network.servers.pcie import PCIE3
from foretrain.network.topology.graph import Topology
from foretrain.units import MICROSECOND, SECOND

SIZE = 1e8
ALPHA = 2 * MICROSECOND


def flows(topology: Topology, sources: np.ndarray, targets: np.ndarray, size: float = SIZE) -> Program:
    router = Shortest(topology)
    paths = router.paths(sources.astype(np.int32), targets.astype(np.int32), np.zeros(len(sources), np.int32))
    return Program.of(paths, np.full(len(sources), size))


def outward(server: PCIeTree) -> tuple[Topology, Program]:
    """Two servers; every GPU sends to its like in the other one."""
    topology = star(2, server=server)
    return topology, flows(topology, topology.ranks, np.roll(topology.ranks, server.gpus))


def rates(topology: Topology, *programs: Program) -> list[np.ndarray]:
    """Bytes/s of every flow while all send."""
    network = Fluid(topology.capacity)
    handles = [network.add(program) for program in programs]
    network.advance(MICROSECOND)
    return [network.rates(handle) for handle in handles]


@pytest.mark.parametrize("gpus", range(1, 9))
@pytest.mark.parametrize(("pcie", "nic"), [(PCIE3, NIC), (PCIE3, 2 * NIC)])
def test_gpus_share_the_slower_of_pcie_and_nic_in_the_baseline_only(gpus: int, pcie: float, nic: float):
    for server, share in ((eflops_baseline(gpus, nic=nic, pcie=pcie), gpus), (eflops(gpus, nic=nic, pcie=pcie), 1)):
        topology, gradients = outward(server)
        finish = run(gradients, topology.capacity).finish
        assert SIZE * SECOND / finish == pytest.approx(min(pcie, nic) / share, rel=1e-12)


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_input_takes_its_share_of_the_way_from_the_root_complex(gpus: int):
    def copies(topology: Topology) -> Program:
        names = [topology.nodes[gpu].server for gpu in topology.ranks]
        memories = np.array([topology.node(f"s{server}.memory0") for server in names])
        return flows(topology, memories, topology.ranks)

    topology, gradients = outward(eflops_baseline(gpus))
    competing, copied = rates(topology, gradients, copies(topology))
    assert competing == pytest.approx(PCIE3 / (2 * gpus), rel=1e-12)
    assert copied == pytest.approx(PCIE3 / (2 * gpus), rel=1e-12)


@pytest.mark.parametrize("gpus", [2, 8])
def test_input_at_the_pace_of_training_holds_up_the_baseline_and_not_eflops(gpus: int):
    """8 GPUs that take 0.705 GB/s each leave gradients 14.4 − 5.6 GB/s, an eleventh of a NIC for each."""
    demand = 0.705e9
    for server in (eflops_baseline(gpus), eflops(gpus)):
        topology, gradients = outward(server)
        socket = np.arange(2 * gpus) % gpus * server.sockets // gpus
        memories = [topology.node(f"s{i // gpus}.memory{s}") for i, s in enumerate(socket.tolist())]
        copies = flows(topology, np.array(memories), topology.ranks)
        # Each copy crosses a link of its own that is as fast as what is asked for.
        own = [np.append(copies.paths.of(flow), topology.links + flow) for flow in range(len(copies))]
        first = np.cumsum([0, *map(len, own)]).astype(np.int32)
        limited = Program.of(Paths(first, np.concatenate(own).astype(np.int32)), copies.size)
        network = Fluid(np.concatenate([topology.capacity, np.full(len(copies), demand)]))
        handle = network.add(joined([gradients, limited]))
        network.advance(MICROSECOND)
        found = network.rates(handle)
        assert found[2 * gpus :] == pytest.approx(demand, rel=1e-12)
        left = min(NIC, PCIE3 - gpus * demand) / gpus if server.shared else NIC
        assert found[: 2 * gpus] == pytest.approx(left, rel=1e-12)


def on_bigraph(switches: int, hosts: int, *, mapped: bool = True, name: str = "hdrm", **options) -> Program:
    topology = bigraph(switches, hosts, NIC)
    seats = hdrm_mapping(switches, hosts).host if mapped else None
    shape = {"switches": switches, "hosts": hosts} if name == "hdrm" else {}
    plan = build(name, "all_reduce", switches * hosts, **shape, **options)
    return place(plan, SIZE, Ecmp(topology), seats, step_latency=ALPHA, wire_latency=False)


def closed_form(ranks: int) -> float:
    """T_HDRM, ps."""
    return 2 * (ranks.bit_length() - 1) * ALPHA + 2 * (ranks - 1) / ranks * SIZE / NIC * SECOND


@pytest.mark.parametrize(("switches", "hosts"), [(4, 2), (8, 2), (8, 4), (16, 8), (32, 16)])
def test_hdrm_on_a_bigraph_takes_its_closed_form(switches: int, hosts: int):
    capacity = bigraph(switches, hosts, NIC).capacity
    assert run(on_bigraph(switches, hosts), capacity).finish.max() == pytest.approx(
        closed_form(switches * hosts), rel=1e-9
    )


@pytest.mark.parametrize(("switches", "hosts"), [(4, 2), (8, 4), (16, 8)])
def test_hdrm_fills_every_direct_link_alike(switches: int, hosts: int):
    """With M = H each link between switches carries what a host sends, and is never asked for more than it has."""
    topology, program = bigraph(switches, hosts, NIC), on_bigraph(switches, hosts)
    network = Fluid(topology.capacity, bins=64)
    network.add(program)
    network.advance()
    carried, width = network.utilisation()
    ranks = switches * hosts
    assert carried.sum(axis=1) == pytest.approx(2 * (ranks - 1) / ranks * SIZE, rel=1e-9)
    assert (carried <= topology.capacity[:, None] * width / SECOND * (1 + 1e-9)).all()
    between = np.isin(topology.source, topology.ranks, invert=True) & np.isin(
        topology.target, topology.ranks, invert=True
    )
    assert carried[between] == pytest.approx(np.broadcast_to(carried[between][0], carried[between].shape), rel=1e-6)
    seats, everyone = hdrm_mapping(switches, hosts), np.arange(ranks)
    for bit in range(ranks.bit_length() - 1):
        assert (flows_on_links(seats, everyone, everyone ^ (1 << bit)) == 1).all()


@pytest.mark.parametrize(("switches", "hosts"), [(4, 2), (8, 4), (16, 8), (32, 16)])
def test_without_the_mapping_halving_doubling_is_slower(switches: int, hosts: int):
    capacity = bigraph(switches, hosts, NIC).capacity
    best = closed_form(switches * hosts)
    for name, options in (("hdrm", {}), ("halving_doubling", {}), ("halving_doubling", {"first": "far"})):
        plain = on_bigraph(switches, hosts, mapped=False, name=name, **options)
        assert run(plain, capacity).finish.max() > 1.2 * best


def test_places_that_are_a_gpu_with_its_nic_are_as_good_as_hosts():
    """PCIe between GPU and NIC is faster than the NIC: the BiGraph of EFLOPS may be simulated without it."""
    topology = bigraph(8, 4, server=eflops(1))
    plan = build("hdrm", "all_reduce", 32, switches=8, hosts=4)
    whole = place(plan, SIZE, Shortest(topology), hdrm_mapping(8, 4).host, step_latency=ALPHA, wire_latency=False)
    assert run(whole, topology.capacity).finish.max() == pytest.approx(closed_form(32), rel=1e-9)
