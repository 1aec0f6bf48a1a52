"""Changes to modules that the script may import, made when it does: importing them for all would take seconds."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

from foretrain.live.device import put

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
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec and spec.loader:
            plainly = spec.loader.exec_module
            put(spec.loader, exec_module=lambda module: self._load(fullname, module, plainly))
        return spec
