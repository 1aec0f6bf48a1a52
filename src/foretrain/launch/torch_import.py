"""Import of PyTorch by the script of a rank, from which on PyTorch is patched.

Importing torch and the patch takes seconds on every rank, and a script of another framework never needs them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING

from foretrain.launch import LaunchSettings, session_used

if TYPE_CHECKING:
    from foretrain.launch.ddp_patch import DdpPatch


class PatchOnImport(MetaPathFinder):
    """Context manager around a script: enters a `foretrain.launch.ddp_patch.DdpPatch` when torch has been imported.

    Meanwhile it is the first finder of modules. What was imported before the block, is patched at its beginning.

    Args:
        settings: of the patch.
    """

    def __init__(self, settings: LaunchSettings) -> None:
        self._settings = settings
        self._patch: DdpPatch | None = None

    def __enter__(self) -> PatchOnImport:
        if "torch" in sys.modules:
            self._begin()
        else:
            sys.meta_path.insert(0, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._patch is not None:
            self._patch.__exit__(kind, error, trace)
            return
        sys.meta_path.remove(self)
        if not session_used() and os.environ.get("RANK", "0") == "0":
            sys.stderr.write("foretrain: nothing was taken over: the script did not import torch; it ran as it is\n")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the other finders find of torch, with a loader that begins the patch; None for other modules."""
        if fullname != "torch":
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        found = next((spec for spec in others if spec is not None), None)
        if found is not None and found.loader is not None:
            execute = found.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._begin()

            # Of this one loader: that of another class would be seen by those who ask torch for its files.
            found.loader.exec_module = exec_module
        return found

    def _begin(self) -> None:
        from foretrain.launch.ddp_patch import DdpPatch

        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._patch = DdpPatch(self._settings).__enter__()
