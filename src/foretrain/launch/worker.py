"""One rank of ``foretrain run``: ``python -m foretrain.launch.worker [OPTION...] train.py ARGUMENT...``.

The script runs as under ``python train.py``: with its ``__main__``, its arguments, its folder first on ``sys.path``,
and tracebacks that begin in its own code. Only DistributedDataParallel is replaced, if the script imports PyTorch.
"""

from __future__ import annotations

import argparse
import logging
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, get_args

from foretrain.comm.options import (
    AllReduce,
    CollectiveBackend,
    Compression,
    ParameterServer,
    Timeouts,
    UpdateLocation,
    as_transport,
)
from foretrain.files import write_json
from foretrain.launch import NOT_ADVISED, LaunchSettings, session_used
from foretrain.parent_death import end_with_parent

if TYPE_CHECKING:
    from foretrain.launch.ddp_patch import DdpPatch


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script under a `PatchOnImport`; errors of the script pass through."""
    options = parser().parse_args(arguments)
    show_log(logging.WARNING if options.quiet else logging.INFO)
    sys.excepthook = print_script_traceback
    end_with_parent()  # ranks are stopped by SIGTERM, but not where their launcher is killed
    with PatchOnImport(settings(options)):
        run_as_main(options.script[0], options.script[1:], module=options.module)


def show_log(level: int = logging.INFO) -> None:
    """Send warnings and the messages of planner and tuner to stderr, whatever the script does with its logs."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("foretrain: %(message)s"))
    logger = logging.getLogger("foretrain")
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


def parser() -> argparse.ArgumentParser:
    """Return the parser of `foretrain.launch.LaunchSettings.arguments` and of the script with its arguments."""
    parser = argparse.ArgumentParser(prog="python -m foretrain.launch.worker", allow_abbrev=False)
    parser.add_argument("--schedule", default=LaunchSettings().schedule)
    parser.add_argument("--compression", choices=get_args(Compression))
    parser.add_argument("--timeout", type=float, default=Timeouts().peer)
    parser.add_argument("--patience", type=float, default=Timeouts().stall)
    parser.add_argument("--backend", choices=get_args(CollectiveBackend))
    parser.add_argument("--transport")
    parser.add_argument("--served", action="store_true")
    parser.add_argument("--updates", choices=get_args(UpdateLocation))
    parser.add_argument("--consistency", default="bsp")
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--advise", action="store_true")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--numbers", type=Path)
    parser.add_argument("-m", "--module", action="store_true")
    # One argument, not two: between two of them argparse would drop a "--" that belongs to the script.
    parser.add_argument("script", nargs=argparse.REMAINDER)
    return parser


def settings(options: argparse.Namespace) -> LaunchSettings:
    """Return the settings that `parser` has read."""
    transport = as_transport(options.transport) if options.transport else AllReduce(backend=options.backend)
    if options.served:
        transport = ParameterServer(None, options.updates, options.consistency, options.elastic)
    timeouts = Timeouts(options.timeout, options.patience)
    return LaunchSettings(
        *(options.schedule, options.compression, transport, timeouts, options.tune, options.advise, options.quiet),
        options.numbers,
    )


class PatchOnImport(MetaPathFinder):
    """Context manager around a script: enters a `foretrain.launch.ddp_patch.DdpPatch` when torch has been imported.

    Importing both takes seconds on every rank, and a script of another framework needs neither. Until then it is the
    first finder of modules. What was imported before the block is patched at its beginning.

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
        line = "" if session_used() else "nothing was taken over: the script did not import torch; it ran as it is"
        if session_used() and self._settings.advise:
            line = NOT_ADVISED
        if os.environ.get("RANK", "0") == "0":
            if line and error is None:
                sys.stderr.write(f"foretrain: {line}\n")
            if self._settings.numbers is not None:
                write_json(self._settings.numbers, {"models": []})

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


def run_as_main(script: str, arguments: Sequence[str], *, module: bool = False) -> None:
    """Run a script, or with ``module`` a module by its dotted name, as ``__main__``; errors pass through."""
    sys.argv = [script, *arguments]
    if module:
        # The current folder is first on sys.path already: this process was started with -m, too.
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    runpy.run_path(script, run_name="__main__")


def print_script_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print ``error`` without foretrain's frames before those of the script, and a remedy if there is no GPU."""
    if any(words in str(error) for words in _WITHOUT_CUDA):
        error.add_note(
            "foretrain: the script uses CUDA, and PyTorch finds none here; to forecast it on GPUs that are not here use"
            " foretrain simulate, else have it compute on the CPU, also where RANK is set, and communicate by gloo"
        )
    while trace and trace.tb_next and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


_WITHOUT_CUDA = (
    *("module 'torch._C' has no attribute '_cuda_", "Torch not compiled with CUDA enabled"),
    *("Distributed package doesn't have NCCL built in", "No CUDA GPUs are available", "Found no NVIDIA driver"),
)
"""Parts of PyTorch's messages about builds without CUDA and machines without GPUs."""
_OURS = (os.path.dirname(os.path.abspath(__file__)) + os.sep, runpy.__file__, "<frozen runpy>")


if __name__ == "__main__":
    main()
