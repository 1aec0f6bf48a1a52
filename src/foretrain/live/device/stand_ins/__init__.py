"""Stand-ins for libraries that machines with GPUs have, and this one need not: Triton, FlashAttention, and others.

They are found only in a simulation, only where the real library is not installed, and say so when they are imported.
Each is one file, with the part of its library that training scripts call: the library's names, shapes and kernels, and
last the modules in which scripts look for them (`submodule`).

Libraries that can do without Apex or Transformer Engine look for them, and take another path where they find them. So
these two are found by the script and what lies beside it, but not by installed packages: there are few machines that
have them. PyTorch does not find Triton's: it would want to compile with it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from email.message import Message
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._triton import has_triton_package

from foretrain.live.device import import_without, put, torchvision_operators

VERSIONS = {
    "apex": "0.1",
    "causal_conv1d": "1.6.0",
    "deep_ep": "1.2.1",
    "flash_attn": "2.8.3",
    "flash_attn_interface": "3.0.0",
    "grouped_gemm": "1.1.4",
    "mamba_ssm": "2.3.0",
    "transformer_engine": "2.9.0",
    "triton": "3.7.1",
}
"""The libraries, and the versions whose interfaces the stand-ins have."""
_EXTENSIONS = dict.fromkeys(("amp_C", "fused_layer_norm_cuda", "fused_weight_gradient_mlp_cuda"), "apex")
"""Modules that stand beside their library."""
_OPTIONAL = frozenset({"apex", *_EXTENSIONS, "transformer_engine"})
"""Libraries that installed packages do without."""
_TORCH = str(Path(torch.__file__).parent)
_installed: list[_Finder] = []
"""The finder of this process, if it has one."""
_INSTALLED: list[str] = []
"""Folders of packages that pip has installed, also by ``--user`` or ``--target``."""


def install(chosen: Sequence[str], tell: Callable[[str], None]) -> None:
    """Let imports that find nothing else find the stand-ins; again, in a forked process, it only tells anew.

    Args:
        chosen: libraries to stand in for, of those that are not installed.
        tell: called with the name of each library whose stand-in is imported, or has been.
    """
    if _installed:
        _installed[0].tell_again(tell)
        return
    _INSTALLED[:] = sorted({str(folder) + os.sep for folder in map(Path, sys.path) if any(folder.glob("*.dist-info"))})
    extensions = [name for name, library in _EXTENSIONS.items() if library in chosen]
    absent = [name for name in (*chosen, *extensions) if importlib.util.find_spec(name) is None]
    if "triton" in absent:
        has_triton_package()  # PyTorch asks once, and must not ask when the stand-in has been imported
        import_without("triton", "torch._inductor.runtime.triton_compat")
    _installed.append(_Finder(absent, tell))
    sys.meta_path.extend(_installed)
    prepared = spawn.get_preparation_data
    put(spawn, get_preparation_data=lambda name: {"stand_ins": _HandedDown(chosen), **prepared(name)})


class _HandedDown:
    """Installs the stand-ins in a process that a rank spawns, where the script's modules are imported again."""

    def __init__(self, chosen: Sequence[str]) -> None:
        self._chosen = chosen

    def __reduce__(self) -> tuple[Callable[..., None], tuple[object, ...]]:
        return _install_again, (self._chosen,)


def _install_again(chosen: Sequence[str]) -> None:
    install(chosen, lambda _: None)
    torchvision_operators.install()


def submodule(name: str, *named: Any, **content: Any) -> ModuleType:
    """Return the module ``name`` with this content, made together with the packages that it is in if it is not there.

    ``named`` are classes and functions under their own names.
    """
    module = sys.modules.get(name)
    if module is None:
        module = sys.modules[name] = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        module.__file__ = str(Path(__file__).with_name(f"{name.partition('.')[0]}.py"))  # for errors of imports
        package, _, last = name.rpartition(".")
        setattr(sys.modules.get(package) or submodule(package), last, module)
    vars(module).update({one.__name__: one for one in named}, **content)
    return module


class _Finder(DistributionFinder):
    """The last finder that is asked."""

    def __init__(self, names: Sequence[str], tell: Callable[[str], None]) -> None:
        self._names, self._tell = names, tell
        self._imported: list[str] = []

    def tell_again(self, tell: Callable[[str], None]) -> None:
        """Call ``tell`` with what has been imported, and with what will be."""
        self._tell = tell
        for library in self._imported:
            tell(library)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        library, _, rest = fullname.partition(".")
        if library not in self._names:
            return None
        if rest:
            return _names_only(fullname) if fullname.startswith("triton.language.") else None
        if _hidden(library):
            return None
        file = Path(__file__).with_name(f"{library}.py")
        spec = importlib.util.spec_from_file_location(fullname, file, submodule_search_locations=[])
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            self._imported.append(library)
            self._tell(library)
            load(module)

        spec.loader.exec_module = exec_module
        return spec

    def find_distributions(self, context: Any = DistributionFinder.Context) -> Iterator[Any]:
        """Yield distributions, as packages ask for them to see a library's version."""
        wanted = context.name and context.name.replace("-", "_").lower()
        for name in self._names:
            if name in VERSIONS and wanted in (None, name) and not _hidden(name):
                yield _StandIn(name)


class _StandIn(Distribution):
    def __init__(self, library: str) -> None:
        self._library = library

    def read_text(self, filename: str) -> str | None:
        if filename == "top_level.txt":
            return self._library
        if filename not in ("METADATA", "PKG-INFO"):
            return None
        found = Message()
        found["Name"], found["Version"] = self._library.replace("_", "-"), VERSIONS[self._library]
        return str(found)

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).with_name(self._library) / path


def _hidden(library: str) -> bool:
    """Return whether the code that imports ``library``, or asks whether it is there, is not to find it."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<frozen importlib") and "importlib" not in Path(file).parts:
            inside = (_TORCH,) if library == "triton" else _INSTALLED if library in _OPTIONAL else ()
            return file.startswith(tuple(inside))
        frame = frame.f_back
    return False


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = vars(sys.modules["triton.language"])["__getattr__"]
        module.__path__ = []


def _names_only(fullname: str) -> ModuleSpec:
    """Return a module of functions of Triton's language, which are named in sources that nobody compiles."""
    return ModuleSpec(fullname, _Loader(), is_package=True)
