"""The documentation's pictures, tables and command outputs are what the code says today."""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent.parent / "docs"
REMEDY = "run: python docs/figures.py"


@pytest.mark.process  # it simulates live ranks, too
def test_regenerating_gives_the_same_bytes():
    spec = importlib.util.spec_from_file_location("figures", DOCS / "figures.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    made = {name: content.encode() for name, content in module.figures()}
    kept = {path.name: path.read_bytes() for path in (DOCS / "_figures").iterdir()}

    assert sorted(made) == sorted(kept), REMEDY
    stale = [name for name, content in made.items() if kept[name] != content]
    assert not stale, REMEDY


def test_pictures_are_small():
    for path in (DOCS / "_figures").iterdir():
        assert path.stat().st_size < 60_000, path.name
