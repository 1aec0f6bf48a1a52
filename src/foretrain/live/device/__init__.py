"""Simulated CUDA device: device type ``cuda`` in a stock CPU build of PyTorch, without data or compute.

An extension in C++ (``native/``, compiled on first use by `native_build`) makes ``torch.empty(device="cuda")`` an
ordinary tensor, so autograd, autocast, DistributedDataParallel's reducer, FSDP and DTensor see what they see on a GPU.
Its kernels infer shapes, keep real values where control flow may depend on them, and write what a GPU would do into the
rank's log (`foretrain.live.event_log`). The rest of the package is Python around it:

`operators` operators with kernels on CUDA, shape functions, FlexAttention · `cuda` and `streams` the C part of
``torch.cuda`` · `process_groups` collectives and stores · `symmetric_memory` memory that GPUs read from each other ·
`clocks` virtual time · `operator_cost` the time of an operator · `checkpoints` what the script saves · `compiler`
``torch.compile`` · `profiler` ``torch.profiler`` · `steps` iterations · `rank` one rank: the device activated, the
script run · `fork_server` the process that all ranks are forked from.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any


def put(owner: Any, /, **values: Any) -> None:
    """Set attributes of ``owner``, a module or class, whether or not it has them."""
    for name, value in values.items():
        setattr(owner, name, value)


class SimulatedNames(SimpleNamespace):
    """What is simulated of a namespace of CUDA's or Triton's; asked for anything else, it says so.

    Args:
        path: by which scripts find the namespace, for the message.
        content: its names.

    Raises:
        AttributeError: the name is not simulated.
    """

    def __init__(self, path: str, /, **content: Any) -> None:
        super().__init__(**content)
        self._path = path

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(one for one in vars(self) if not one.startswith("_"))
        text = f"{self._path}: a simulated GPU has no {name!r}; it has: {known}"
        raise AttributeError(text, name=name, obj=self)


Change = Callable[[ModuleType], None]


def change_after_import(changes: Mapping[str, Change]) -> None:
    """Call each change with its module, by name, when that has been imported; at once if it has been before."""
    for name, change in changes.items():
        if name in sys.modules:
            change(sys.modules[name])

    def load(name: str, module: ModuleType, plainly: Change) -> None:
        plainly(module)
        changes[name](module)

    sys.meta_path.insert(0, _Finder(tuple(changes), load))


def import_without(absent: str, *names: str) -> None:
    """Let these modules not find the module ``absent`` when they are imported, even if others have imported it."""

    def load(_: str, module: ModuleType, plainly: Change) -> None:
        hidden = sys.modules.get(absent)
        # None in sys.modules is an ImportError.
        sys.modules.update({absent: None})  # pyright: ignore[reportCallIssue, reportArgumentType]
        try:
            plainly(module)
        finally:
            del sys.modules[absent]
            if hidden is not None:
                sys.modules[absent] = hidden

    sys.meta_path.insert(0, _Finder(names, load))


class _Finder(importlib.abc.MetaPathFinder):
    """Finder of the modules ``names``, which ``load`` imports, given name, module, and what loads it plainly."""

    def __init__(self, names: Sequence[str], load: Callable[[str, ModuleType, Change], None]) -> None:
        self._names, self._load = names, load

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._names:
            return None
        # Editable installs and mpi4py have finders of their own.
        others = [
            finder for finder in sys.meta_path if hasattr(finder, "find_spec") and not isinstance(finder, _Finder)
        ]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec and spec.loader:
            plainly = spec.loader.exec_module
            put(spec.loader, exec_module=lambda module: self._load(fullname, module, plainly))
        return spec
