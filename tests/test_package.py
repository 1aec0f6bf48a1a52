"""What the package shows to the world, and what it costs to import."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import foretrain as ft
from foretrain.errors import MissingExtra


def test_public_names():
    classes = "AllReduce Attached Bound BoundedLoss Cluster CommTask Comparison ConfigError Failures ForetrainError"
    classes += " ParameterServer Recommendation Run SearchResult Session Spec Stragglers Timeline Timeouts Workload"
    functions = "attach bound choose cluster compare search simulate sweep workload"
    assert ft.__all__ == [*classes.split(), *functions.split()]
    for name in ft.__all__:
        assert getattr(ft, name) is not None
    assert callable(ft.compare)
    assert callable(ft.workload.zoo)
    assert callable(ft.cluster.preset)
    with pytest.raises(AttributeError, match="it has: AllReduce, Attached, Bound"):
        _ = ft.nothing  # pyright: ignore


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import foretrain", ("foretrain.simulation", "rich", "numpy", "torch")),
        ("from foretrain.cli import main", ("foretrain.simulation", "jinja2", "numpy", "torch")),
        ("import foretrain.experiments, foretrain.report", ("jinja2", "perfetto", "numpy", "torch")),
        ("import foretrain.workload as w; w.zoo('resnet50')", ("torch", "numpy", "foretrain.workload.recorder")),
    ],
)
@pytest.mark.smoke
def test_imports_stay_lean(code: str, absent: tuple[str, ...]):
    script = f"{code}; import sys; print(sorted(set({absent!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("name", "package"), [("jax", "jax"), ("keras", "tensorflow"), ("mxnet", "mxnet")])
def test_a_framework_that_is_not_installed_is_named_with_its_extra(monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)  # its import fails, as where it is not installed
    for module in (f"foretrain.plugins.{name}", "foretrain.mxnet"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    if name == "keras":
        monkeypatch.setitem(sys.modules, "keras", ModuleType("keras"))  # whose import takes seconds
    with pytest.raises(MissingExtra, match=rf"needs the package '{package}'.*pip install 'foretrain\[{name}\]'"):
        getattr(ft, name)


_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # its import fails, as where it is not installed
import importlib, pkgutil, foretrain
for package in {packages}:
    found = importlib.import_module(f"foretrain.{{package}}")
    for module in pkgutil.walk_packages(getattr(found, "__path__", ()), f"{{found.__name__}}."):
        importlib.import_module(module.name)
"""


@pytest.mark.smoke
def test_communication_and_everything_below_it_imports_without_torch():
    simulated = ("collective", "device", "network", "planner", "schedule", "simulation", "trace", "workload")
    code = _WITHOUT_TORCH.format(packages=("comm", "engine", "experiments", "tasks", "units", *simulated))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


ROOT = Path(__file__).parents[1]


def _imported(text: str) -> Iterator[tuple[str, str]]:
    """Yield module and name of everything that a script imports from the package."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "foretrain":
            yield from ((node.module, alias.name) for alias in node.names)


@cache
def _defined(module: str) -> frozenset[str]:
    """Return the names that a module defines or imports at any level, and its submodules."""
    folder = ROOT.joinpath("src", *module.split("."))
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    found = {path.stem for path in folder.glob("*.py")} | {path.name for path in folder.glob("*/")}
    for node in ast.walk(ast.parse(file.read_text())) if file.is_file() else ():
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return frozenset(found | set(ft.__all__ if module == "foretrain" else ()))


@pytest.mark.parametrize("folder", ["benchmarks", "docs", "examples", "tools"])
def test_what_scripts_import_from_the_package_is_there(folder: str):
    """Most of them run seldom, and none is checked for its types."""
    lacking = [
        f"{script}: {module}.{name}"
        for script in (ROOT / folder).rglob("*.py")
        for module, name in _imported(script.read_text())
        if name not in _defined(module)
    ]
    assert not lacking
