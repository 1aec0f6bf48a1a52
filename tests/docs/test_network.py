"""Examples on the pages about networks run, what they say can be written is read, and no name is left out."""

import re
from pathlib import Path

import pytest

from foretrain.network import cluster
from foretrain.network.deployment_notation import topology
from foretrain.network.fabrics import FABRICS
from foretrain.network.servers import SERVERS

DOCS = Path(__file__).parent.parent.parent / "docs"
INDEX, TOPOLOGIES = ((DOCS / "network" / name).read_text(encoding="utf-8") for name in ("index.md", "topologies.md"))


def shown(page: str, capsys) -> list[str]:
    """Run the Python examples of a page; return the lines that they print."""
    names: dict[str, object] = {}
    text = (DOCS / "network" / page).read_text(encoding="utf-8")
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(code, page, "exec"), names)
    return capsys.readouterr().out.splitlines()


def test_the_example_of_the_fluid_simulation_runs(capsys):
    alone, first, second = (int(time) for line in shown("fluid.md", capsys) for time in line.split())
    assert alone < first < second


def test_the_examples_of_packets_run(capsys):
    lines = [line.split() for line in shown("packet.md", capsys)]
    levels = dict(line for line in lines if line[0] in ("ideal", "fluid", "packet"))
    assert int(levels["ideal"]) <= int(levels["fluid"]) < int(levels["packet"])


def test_the_example_of_tolerance_runs(capsys):
    size, result = shown("tolerance.md", capsys)
    mean, share = map(float, result.split())
    assert size == "[10000. 10000.]"
    # A packet with the sums of two ranks is lost, and all four lack them.
    assert mean == pytest.approx(4 - 2 * 365 / 10_500)
    assert 0 < share < 0.02


@pytest.mark.parametrize("page", ["collectives.md", "nccl.md", "topologies.md"])
def test_examples_on_other_pages_run(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # one of them writes a file
    shown(page, capsys)


@pytest.mark.parametrize("text", sorted(set(re.findall(r"--cluster (\S+)", INDEX))))
def test_every_cluster_on_the_page_is_read(text):
    assert cluster(text).total_gpus > 1


FILES = [str(DOCS / "files" / name) for name in ("topology.toml", "nodes.toml")]


@pytest.mark.parametrize("text", [*sorted(set(re.findall(r"`((?:\w|-)+:\d[^`]*)`", TOPOLOGIES))), *FILES])
def test_every_topology_on_the_page_is_read(text: str):
    assert len(topology(text).ranks) > 1


def test_every_name_of_a_fabric_or_server_is_on_the_page():
    assert not {name for name in (*FABRICS, *SERVERS[1:]) if f"`{name}`" not in TOPOLOGIES}
