"""``python -m foretrain.launch.worker [OPTION...] train.py ARGUMENT...``: one rank, as torchrun starts it.

The script sees what it would see under ``python train.py``: its ``__main__``, its arguments, its folder first on
``sys.path``, and tracebacks that begin in its own code. Only DistributedDataParallel is another.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import get_args

from foretrain.launch import Compression, LaunchSettings, Place
from foretrain.launch.main_script import run_as_main, told_as_its_own
from foretrain.parent_death import end_with_parent


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script under a `foretrain.launch.ddp_patch.DdpPatch`; what the script raises is raised again."""
    options = parser().parse_args(arguments)
    from foretrain.launch.ddp_patch import DdpPatch

    settings = LaunchSettings(
        options.schedule,
        options.compression,
        options.timeout,
        options.patience,
        options.served,
        options.updates,
        options.consistency,
        options.elastic,
        options.tune,
    )
    show_log()
    sys.excepthook = told_as_its_own
    end_with_parent()  # torchrun ends its ranks when it is asked to end, but not when it is killed
    with DdpPatch(settings):
        run_as_main(options.script[0], options.script[1:], module=options.module)


def show_log() -> None:
    """What the planner and the tuner say, and warnings, go to stderr, whatever the script does with its logs."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("foretrain: %(message)s"))
    logger = logging.getLogger("foretrain")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def parser() -> argparse.ArgumentParser:
    """Reads what `foretrain.launch.LaunchSettings.arguments` writes, and then the script with its arguments."""
    parser = argparse.ArgumentParser(prog="python -m foretrain.launch.worker", allow_abbrev=False)
    parser.add_argument("--schedule", default=LaunchSettings().schedule)
    parser.add_argument("--compression", choices=get_args(Compression))
    parser.add_argument("--timeout", type=float, default=LaunchSettings().timeout)
    parser.add_argument("--patience", type=float, default=LaunchSettings().patience)
    parser.add_argument("--served", action="store_true")
    parser.add_argument("--updates", choices=get_args(Place))
    parser.add_argument("--consistency", default=LaunchSettings().consistency)
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("-m", "--module", action="store_true")
    # One argument and not two: between two of them argparse would swallow a "--" that is the script's.
    parser.add_argument("script", nargs=argparse.REMAINDER)
    return parser


if __name__ == "__main__":
    main()
