"""The check of the house finds shared class names and import cycles, and nothing else."""

import ast
from pathlib import Path

import pytest

from tests.processes import module_at

TOOL = Path(__file__).parent.parent.parent / "tools" / "house.py"


@pytest.fixture(scope="module")
def house():
    return module_at(TOOL)


def trees(house, files):
    return {house.PACKAGE / name: ast.parse(text) for name, text in files.items()}


def test_a_public_class_name_in_two_files_is_found(house):
    files = {"a.py": "class Plan: ...", "b/c.py": "class Plan: ...\nclass _Own: ...", "d.py": "class _Own: ..."}
    assert house.shared_class_names(trees(house, files)) == {"Plan": ["a.py", "b/c.py"]}


def test_a_cycle_is_found_where_it_runs_through_an_import_for_type_checking(house):
    files = {
        "a.py": "from foretrain import b",
        "b.py": "if TYPE_CHECKING:\n    from foretrain.c import thing",
        "c.py": "import foretrain.a",
    }
    (cycle,) = house.import_cycles(trees(house, files))
    assert cycle[0] == cycle[-1]
    assert set(cycle) == {"foretrain.a", "foretrain.b", "foretrain.c"}


def test_a_package_that_imports_a_module_that_imports_the_package_is_a_cycle(house):
    files = {"p/__init__.py": "from foretrain.p.a import x", "p/a.py": "from foretrain.p import y"}
    assert len(house.import_cycles(trees(house, files))) == 1


def test_imports_inside_functions_and_of_modules_beside_are_no_cycle(house):
    files = {
        "p/__init__.py": "from foretrain.p.a import x",
        "p/a.py": "from foretrain.p import b",
        "p/b.py": "def f():\n    from foretrain.p.a import x",
    }
    assert house.import_cycles(trees(house, files)) == []
