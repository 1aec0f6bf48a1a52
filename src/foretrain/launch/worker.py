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
from types import TracebackType
from typing import get_args

from foretrain.comm.options import (
    AllReduce,
    CollectiveBackend,
    Compression,
    ParameterServer,
    Timeouts,
    UpdateLocation,
    as_transport,
)
from foretrain.launch import LaunchSettings
from foretrain.launch.torch_import import PatchOnImport
from foretrain.parent_death import end_with_parent


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script under a `foretrain.launch.torch_import.PatchOnImport`; errors of the script pass through."""
    options = parser().parse_args(arguments)
    show_log()
    sys.excepthook = print_script_traceback
    end_with_parent()  # ranks are stopped by SIGTERM, but not where their launcher is killed
    with PatchOnImport(settings(options)):
        run_as_main(options.script[0], options.script[1:], module=options.module)


def show_log() -> None:
    """Send warnings and the messages of planner and tuner to stderr, whatever the script does with its logs."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("foretrain: %(message)s"))
    logger = logging.getLogger("foretrain")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
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
    return LaunchSettings(options.schedule, options.compression, transport, timeouts, options.tune, options.advise)


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
