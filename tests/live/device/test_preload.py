"""Imports that ranks and simulations share, read from a script's sources."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from foretrain.live.device.preload import (
    Imported,
    _own_sources,
    _script_sources,
    _torch_imports,
    libraries_of,
    preload,
)
from foretrain.live.device.settings import RankSettings
from foretrain.live.rank_processes import WarmForkServers
from foretrain.live.simulate import simulate
from foretrain.network.deployment_notation import equipped
from foretrain.network.fidelity import Fidelity
from tests.live.command import _require_device


def _settings(script: Path | str, *, module: bool = False) -> RankSettings:
    return RankSettings((str(script),), "H100", 1, 1, "/store", module=module)


def test_modules_of_pytorch_that_a_script_names_are_found() -> None:
    source = """
import os, torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from .torch.near import x
def main():
    from torch.utils import data
    import torchvision
"""
    assert set(_torch_imports(source)) == {"torch.nn.functional", "torch.distributed.fsdp", "torch.utils"}


def test_imports_are_read_from_a_script_and_from_files_beside_it_that_it_imports(tmp_path: Path) -> None:
    texts = {"train": "import model\n", "model": "import train, layers, os\n", "layers": "import (", "other": "pass\n"}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert sorted(_script_sources(_settings(tmp_path / "train.py"))) == sorted(
        texts[name] for name in ("train", "model", "layers")
    )


@pytest.mark.parametrize("text", ["import torch.no_such_module, torch.utils.bottleneck", "\0", "import ("])
def test_an_import_that_fails_is_left_to_the_script(text: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(text)
    for name in ("train.py", "absent.py"):
        preload(_settings(tmp_path / name))
    assert "torch.no_such_module" not in sys.modules


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which packages are installed, where Python finds them."""
    folder = tmp_path / "installed"
    (folder / "lib-1.0.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    yield folder
    _own_sources.cache_clear()


def _write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def test_libraries_are_those_that_a_script_and_its_own_modules_surely_import(installed: Path, tmp_path: Path) -> None:
    names = ("near", "far", "tried", "late", "when_asked", "checked", "instead", "sub")
    _write(installed, **{f"lib_{name}": "" for name in names})
    script = tmp_path / "script"
    _write(
        script,
        train="""
import os, json, lib_near
from typing import TYPE_CHECKING
from own.parts import part
try:
    import lib_tried
except ImportError:
    import lib_instead
if TYPE_CHECKING:
    import lib_checked
def main():
    import lib_late
if os.environ.get("ASKED"):
    import lib_when_asked
""",
        own__part="from . import other\n",
    )
    (script / "own/parts").mkdir()
    (script / "own/__init__.py").write_text("")
    (script / "own/other.py").write_text("from lib_sub import thing\n")
    (script / "own/parts/__init__.py").write_text("from ..part import x\n")
    (script / "own/parts/part.py").write_text("import lib_far as far\n")
    found = libraries_of(_settings(script / "train.py"))
    assert {*found} == {
        Imported("lib_near"),
        Imported("lib_tried"),
        Imported("lib_far"),
        Imported("lib_sub", ("thing",)),
    }


def test_a_module_is_read_with_its_package_and_not_run(installed: Path, tmp_path: Path, monkeypatch) -> None:
    _write(installed, lib_near="")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/__init__.py").write_text("from pack import config\nraise SystemExit\n")
    (tmp_path / "pack/config.py").write_text("import lib_near\n")
    (tmp_path / "pack/train.py").write_text("from .config import x\nimport torch.utils.bottleneck\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = libraries_of(_settings("pack.train", module=True))
    assert {*found} == {Imported("lib_near"), Imported("torch.utils.bottleneck")}
    assert not libraries_of(_settings("no_such_package.train", module=True))


SCRIPT = """
import lib_counted
import torch

assert lib_counted.seconds() < 100, "a real clock"
assert lib_counted.value == "right"
weight = torch.nn.Parameter(torch.ones(4096, 4096, device="cuda"))
optimizer = torch.optim.SGD([weight])
for _ in range(3):
    (weight @ weight).sum().backward()
    optimizer.step()
"""
LIBRARY = """
import os, pathlib
from time import monotonic as seconds
value = "right"
with pathlib.Path(__file__).with_name("imports").open("a") as file:
    file.write("x")
"""


@pytest.mark.parametrize(
    ("library", "safe"),
    [
        (LIBRARY, True),
        (LIBRARY + "os.environ.get('LOCAL_RANK')", False),
        (LIBRARY + "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", False),
        (LIBRARY + "import torch; torch.ones(8, device='cuda')", False),
        (LIBRARY + "if 'RANK' not in os.environ: raise SystemExit", False),
    ],
    ids=["simple", "asks for its rank", "starts a thread", "uses the GPU", "ends the process"],
)
@pytest.mark.parametrize("shared_by", ["simulations", "ranks"])
def test_a_library_is_imported_once_where_that_is_safe(
    library: str, safe: bool, shared_by: str, installed: Path, tmp_path: Path
) -> None:
    _require_device()
    _write(installed, lib_counted=library)
    _write(tmp_path, train=SCRIPT)

    def step(cluster: str, **options: Any) -> int:
        where = equipped(cluster, None)[0].simulated(Fidelity("fluid"))
        return simulate([str(tmp_path / "train.py")], where, steps=3, **options).forecast.iteration_time

    if shared_by == "ranks":
        step("dgx-h100:1,ranks=0-2", live="all")
        users = 3
    else:
        with Path(os.devnull).open("w") as output, WarmForkServers(output.fileno()) as warm:
            shared = [step("H100", warm=warm) for _ in range(2)]
        users = 2
        assert shared[0] == shared[1]
    # It is tried once; where that is not safe, each imports it itself.
    assert len((installed / "imports").read_text()) == (1 if safe else 1 + users)
    if safe and shared_by == "simulations":
        assert shared[0] == step("H100")


def test_a_file_beside_the_script_hides_a_library_that_another_library_imports(installed: Path, tmp_path: Path) -> None:
    _require_device()
    _write(installed, lib_counted=LIBRARY + "import lib_hidden", lib_hidden="value = 'installed'")
    _write(tmp_path, train="import lib_hidden\nassert lib_hidden.value == 'own'\n" + SCRIPT, lib_hidden="value = 'own'")
    where = equipped("H100", None)[0].simulated(Fidelity("fluid"))
    with Path(os.devnull).open("w") as output, WarmForkServers(output.fileno()) as warm:
        assert simulate([str(tmp_path / "train.py")], where, steps=3, warm=warm).forecast.iteration_time
