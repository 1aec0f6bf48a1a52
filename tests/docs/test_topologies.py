"""What the page on topologies says can be written can be read, and nothing known by name is left out."""

import re
from pathlib import Path

import pytest

from foretrain.network.fabrics import FABRICS
from foretrain.network.servers import SERVERS
from foretrain.network.topology.notation import topology

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE = (DOCS / "network" / "topologies.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", sorted(set(re.findall(r"`((?:\w|-)+:\d[^`]*)`", PAGE))))
def test_every_example_is_read(text: str):
    assert len(topology(text).ranks) > 1


@pytest.mark.parametrize("name", ["topology.toml", "nodes.toml"])
def test_every_file_is_read(name: str):
    assert len(topology(str(DOCS / "files" / name)).ranks) > 1


def test_every_name_is_there():
    assert not {name for name in (*FABRICS, *SERVERS[1:]) if f"`{name}`" not in PAGE}
