"""Servers: their parts, their links, and which way bytes take."""

from collections import Counter
from itertools import combinations, permutations

import numpy as np
import pytest

from foretrain.collective import build, hdrm_mapping
from foretrain.errors import ConfigError
from foretrain.network.fabrics.clos import bigraph, star
from foretrain.network.fluid import Fluid, run
from foretrain.network.program import Program, joined, place
from foretrain.network.routing import Ecmp, Shortest
from foretrain.network.servers import HYBRID_CUBE_MESH, SERVERS, NVLinkMesh, NVSwitch, PCIeTree, preset
from foretrain.network.servers.pcie import NIC, PCIE3, eflops, eflops_baseline
from foretrain.network.topology.graph import Topology
from foretrain.units import MICROSECOND, SECOND
from tests.network.ways import names, shortest

GB = 1e9
REAL = [name for name in SERVERS if name != "host"]


def test_the_mesh_of_a_dgx_1_is_the_one_nvidia_smi_prints():
    printed = """
        X 1 1 2 2 - - -
        1 X 2 1 - 2 - -
        1 2 X 2 - - 1 -
        2 1 2 X - - - 1
        2 - - - X 1 1 2
        - 2 - - 1 X 2 1
        - - 1 - 1 2 X 2
        - - - 1 2 1 2 X"""
    rows = [line.split() for line in printed.split("\n")[1:]]
    table = {(a, b): int(x) for a, row in enumerate(rows) for b, x in enumerate(row) if a < b and x != "-"}
    assert table == HYBRID_CUBE_MESH
    links = Counter[int]()
    for pair, many in HYBRID_CUBE_MESH.items():
        links.update(dict.fromkeys(pair, many))
    assert set(links.values()) == {6}


@pytest.mark.parametrize(
    ("name", "nvlink", "port"),
    [
        ("dgx-v100", 150, 12.5),
        ("dgx-a100", 300, 25),
        ("dgx-h100", 450, 50),
        ("dgx-h200", 450, 50),
        ("dgx-b200", 900, 50),
        ("dgx-b300", 900, 100),
        ("gb200-nvl72", 900, 50),
        ("gb300-nvl72", 900, 100),
        ("p3.16xlarge", 150, 3.125),
    ],
)
def test_rates_of_datasheets(name: str, nvlink: float, port: float):
    made = star(2, server=preset(name))
    for gpu in made.ranks:
        links = range(made.first[gpu], made.first[gpu + 1])
        leaving = [made.rate[link] for link in links if made.nodes[made.target[link]].kind in ("gpu", "nvswitch")]
        assert sum(leaving) == pytest.approx(nvlink * GB)
    assert preset(name).port == port * GB


@pytest.mark.parametrize("name", REAL)
def test_what_is_promised_is_there(name: str):
    server = preset(name)
    made = star(3, server=server)
    assert made.servers == 3
    assert made.counts()["gpu"] == 3 * server.gpus == 3 * (72 if "nvl72" in name else 8)
    assert made.counts()["nic"] == 3 * server.nics
    assert len(made.between("s1.host0.nic0" if "nvl72" in name else "s1.nic0", "switch")) == 1


@pytest.mark.parametrize("name", ["dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200", "gb200-nvl72"])
def test_gpus_of_a_server_meet_at_the_nvswitch_which_reduces_since_hopper(name: str):
    made = star(2, server=preset(name))
    assert made.nodes[made.node("s0.nvswitch")].reduces == (name != "dgx-a100")
    for a, b in permutations(range(8), 2):  # of two machines in a rack
        assert [names(made, way)[1:-1] for way in shortest(made, a, b)] == [["s0.nvswitch"]]


def test_gpus_of_a_mesh_meet_over_their_own_links_and_else_over_pcie():
    made = star(2, server=preset("dgx-v100"))
    for pair in combinations(range(8), 2):
        (way,) = shortest(made, *pair)
        direct = [] if pair in HYBRID_CUBE_MESH else ["pcie", "root", "root", "pcie"]
        assert [made.nodes[node].kind for node in way[1:-1]] == direct


@pytest.mark.parametrize("name", REAL)
def test_bytes_leave_through_the_nearest_nic(name: str):
    server = preset(name)
    made = star(2, server=server)
    gpus_per_nic = server.gpus // server.nics
    for a, b in ((0, 0), (3, 3), (5, 0), (7, 7)):
        ways = shortest(made, a, server.gpus + b)
        assert len(ways) == 1
        nics = [node for node in names(made, ways[0]) if "nic" in node]
        if "nvl72" in name:
            assert nics == [f"s0.host{a // 4}.nic{a % 4}", f"s1.host{b // 4}.nic{b % 4}"]
        else:
            assert nics == [f"s0.nic{a // gpus_per_nic}", f"s1.nic{b // gpus_per_nic}"]


@pytest.mark.parametrize("server", [eflops_baseline, eflops])
def test_input_data_comes_through_the_root_complex(server):
    made = star(2, server=server(4))
    gpu = made.nodes[made.ranks[0]].name
    for ends in (("s0.memory0", "s0.root0"), ("s0.storage", "s0.root0"), ("s0.pcie0", gpu)):
        assert len(made.between(*ends)) == 1
    assert not made.nodes[made.node("s0.memory0")].forwards
    for gpus in (1, 2, 3, 8, 16):
        assert (server(gpus).nics, server(gpus).gpus) == (1 if server is eflops_baseline else gpus, gpus)


def test_impossible_servers_are_refused():
    tree = {"sockets": 2, "switches": 2, "ports": 1, "gpus_per_port": 1, "nics_per_port": 1, "lanes": GB, "port": GB}
    assert PCIeTree(**tree, peer=GB).gpus == 2
    for changes, field in (({"switches": 3}, "server.switches"), ({"nics_per_port": 0}, "server.nics")):
        with pytest.raises(ConfigError) as caught:
            PCIeTree(**tree | changes, peer=GB)
        assert caught.value.field == field
    with pytest.raises(ConfigError, match="GPUs are 0 to 1"):
        NVLinkMesh(PCIeTree(**tree, peer=GB), GB)
    with pytest.raises(ConfigError, match="did you mean 'dgx-h100'"):
        preset("dgx-h10")
    assert isinstance(preset("DGX_H100"), NVSwitch)


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


def rates(capacity: np.ndarray, program: Program) -> np.ndarray:
    """Bytes/s of every flow while all send."""
    network = Fluid(capacity)
    handle = network.add(program)
    network.advance(MICROSECOND)
    return network.rates(handle)


@pytest.mark.parametrize("gpus", range(1, 9))
@pytest.mark.parametrize(("pcie", "nic"), [(PCIE3, NIC), (PCIE3, 2 * NIC)])
def test_gpus_share_the_slower_of_pcie_and_nic_in_the_baseline_only(gpus: int, pcie: float, nic: float):
    for server, share in ((eflops_baseline(gpus, nic=nic, pcie=pcie), gpus), (eflops(gpus, nic=nic, pcie=pcie), 1)):
        topology, gradients = outward(server)
        finish = run(gradients, topology.capacity).finish
        assert SIZE * SECOND / finish == pytest.approx(min(pcie, nic) / share, rel=1e-12)


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_input_takes_its_share_of_the_way_from_the_root_complex(gpus: int):
    topology, gradients = outward(eflops_baseline(gpus))
    memories = [topology.node(f"s{topology.nodes[gpu].server}.memory0") for gpu in topology.ranks]
    competing = joined([gradients, flows(topology, np.array(memories), topology.ranks)])
    assert rates(topology.capacity, competing) == pytest.approx(PCIE3 / (2 * gpus), rel=1e-12)


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


@pytest.mark.parametrize(("switches", "hosts"), [(4, 2), (16, 8), (32, 16)])
def test_without_the_mapping_halving_doubling_is_slower(switches: int, hosts: int):
    capacity = bigraph(switches, hosts, NIC).capacity
    best = closed_form(switches * hosts)
    for name, options in (("hdrm", {}), ("halving_doubling", {}), ("halving_doubling", {"first": "far"})):
        plain = on_bigraph(switches, hosts, mapped=False, name=name, **options)
        assert run(plain, capacity).finish.max() > 1.2 * best


@pytest.mark.parametrize(("switches", "hosts"), [(4, 2), (6, 3), (8, 4), (10, 5), (6, 2), (12, 3)])
def test_hdrm_never_has_two_flows_on_a_link_between_switches(switches: int, hosts: int):
    topology, program = bigraph(switches, hosts, NIC), on_bigraph(switches, hosts)
    kinds = np.array([node.kind == "switch" for node in topology.nodes])
    between = np.flatnonzero(kinds[topology.source] & kinds[topology.target])
    fluid = Fluid(topology.capacity)
    handle = fluid.add(program)
    flow_of = np.repeat(np.arange(len(program)), np.diff(program.paths.first))
    most = 0
    while handle.end is None:
        fluid.advance(int(np.ceil(fluid.next_event())))
        if handle.end is None:
            moving = fluid.rates(handle)[flow_of] > 0
            most = max(most, int(np.bincount(program.paths.links[moving], minlength=topology.links)[between].max()))
    assert most == 1
