"""The architecture page names files and functions that exist, and its diagram is the contract of today."""

import re
from pathlib import Path

from tests.processes import module_at

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "src" / "foretrain"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FILE = r"`(foretrain/[\w/]+\.(?:py|cpp|hpp))`"


def layers():
    return module_at(ROOT / "docs" / "layers.py")


def test_every_file_that_is_named_exists():
    files = set(re.findall(FILE, PAGE))
    assert len(files) > 40
    assert not {name for name in files if not (SOURCE.parent / name).is_file()}


def test_every_function_that_is_named_behind_a_file_is_in_it():
    named = re.findall(FILE + r"\s+\(((?:`\w+`(?:,\s+)?)+)\)", PAGE)
    assert len(named) > 15
    missing = {
        f"{name}: {function}"
        for name, functions in named
        for function in re.findall(r"\w+", functions)
        if not re.search(rf"\b{function}\b", (SOURCE.parent / name).read_text(encoding="utf-8"))
    }
    assert not missing


def test_the_diagram_is_the_contract_of_today():
    kept = (ROOT / "docs" / "_figures" / "layers.svg").read_text(encoding="utf-8")
    assert layers().svg() == kept, "run: python docs/figures.py"


def test_the_diagram_shows_every_package():
    drawn = {name for row in layers().layers() for name in row}
    held = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    # mxnet.py is another name of a plug-in, for the two lines of ByteScheduler's paper.
    modules = {path.stem for path in SOURCE.glob("*.py")} - {"__init__", "__main__", "mxnet"}
    assert held | modules == drawn
    assert drawn == layers().HOLDS.keys()


def test_packages_that_are_drawn_as_importing_no_framework_do_not():
    for path in SOURCE.rglob("*.py"):
        package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if package in layers().TORCH | {"workload", "__init__"}:  # the recorder is called by who has torch already
            continue
        assert not re.search(r"^(import|from) torch\b", path.read_text(encoding="utf-8"), re.MULTILINE), path
