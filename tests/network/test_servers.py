"""Servers: their parts, their links, and which way bytes take."""

from collections import Counter

import pytest

from foretrain.errors import ConfigError
from foretrain.network.fabrics.star import star
from foretrain.network.servers import SERVERS, NVLinkMesh, NVSwitch, PCIeTree, preset
from foretrain.network.servers.eflops import eflops, eflops_baseline
from foretrain.network.servers.nvlink_mesh import HYBRID_CUBE_MESH
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
    assert made.counts()["gpu"] == 3 * server.gpus == 24
    assert made.counts()["nic"] == 3 * server.nics
    assert len(made.between("s1.nic0", "switch")) == 1


def test_nvswitches_reduce_since_hopper():
    for name in ("dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200"):
        made = star(1, server=preset(name))
        assert made.nodes[made.node("s0.nvswitch")].reduces == (name != "dgx-a100")


@pytest.mark.parametrize("name", ["dgx-a100", "dgx-h100", "dgx-b200"])
def test_gpus_of_a_server_meet_at_the_nvswitch(name: str):
    made = star(2, server=preset(name))
    for a in range(8):
        for b in set(range(8)) - {a}:
            assert [names(made, way)[1:-1] for way in shortest(made, a, b)] == [["s0.nvswitch"]]


def test_gpus_of_a_mesh_meet_over_their_own_links_and_else_over_pcie():
    made = star(2, server=preset("dgx-v100"))
    for a in range(8):
        for b in range(a + 1, 8):
            (way, *more) = shortest(made, a, b)
            assert not more
            if (a, b) in HYBRID_CUBE_MESH:
                assert len(way) == 2
            else:
                kinds = [made.nodes[node].kind for node in way[1:-1]]
                assert kinds == ["pcie", "root", "root", "pcie"]


@pytest.mark.parametrize("name", REAL)
def test_bytes_leave_through_the_nearest_nic(name: str):
    server = preset(name)
    made = star(2, server=server)
    gpus_per_nic = server.gpus // server.nics
    for a, b in ((0, 8), (3, 11), (5, 8), (7, 15)):
        ways = shortest(made, a, b)
        assert len(ways) == 1
        nics = [node for node in names(made, ways[0]) if "nic" in node]
        assert nics == [f"s0.nic{a // gpus_per_nic}", f"s1.nic{(b - 8) // gpus_per_nic}"]


def test_the_baseline_shares_its_root_complex_and_eflops_does_not():
    shared, beside = star(2, server=eflops_baseline(4)), star(2, server=eflops(4))
    for rank in range(4):
        assert "s0.root0" in names(shared, shortest(shared, rank, 4)[0])
        assert not any("root" in name for name in names(beside, shortest(beside, rank, 4)[0]))
    assert (eflops_baseline(4).nics, eflops(4).nics) == (1, 4)


@pytest.mark.parametrize("made", [star(2, server=eflops_baseline(4)), star(2, server=eflops(4))])
def test_input_data_comes_through_the_root_complex(made):
    gpu = made.nodes[made.ranks[0]].name
    for source in ("s0.memory0", "s0.storage"):
        from_there = made.between(source, "s0.root0")
        assert len(from_there) == 1
    assert len(made.between("s0.pcie0", gpu)) == 1
    assert not made.nodes[made.node("s0.memory0")].forwards


@pytest.mark.parametrize("gpus", [1, 2, 3, 8, 16])
def test_eflops_has_a_nic_for_every_gpu(gpus: int):
    assert eflops(gpus).nics == gpus
    assert eflops_baseline(gpus).nics == 1
    assert len(star(2, server=eflops(gpus)).ranks) == 2 * gpus


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
