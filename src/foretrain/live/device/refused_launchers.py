"""Launchers inside a simulation, e.g. ``torchrun``: commands that refuse to start anything.

A rank sees when its script starts one (`child_processes`), but not when a shell script that it starts does.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from foretrain.launch import LAUNCHER_MODULES, launched
from foretrain.live.device import commands

_NAMES: Final = ("torchrun", "accelerate", "accelerate-launch", "deepspeed", "fabric", "lightning")
_PYTHONS: Final = ("python", "python3")
"""Commands that launch by ``-m`` and a module."""
_NOTE: Final = "refused"
"""A file beside the commands."""
_REFUSED: Final = 2
"""Exit status of a launcher whose command line is wrong."""
_NOT_FOUND: Final = 127
"""Exit status of a shell for a command that there is not."""


def install(folder: str) -> None:
    """Write the commands into ``folder``."""
    for name in _NAMES:
        commands.write(folder, name, __name__, folder, name)
    for name in _PYTHONS:
        if path := shutil.which(name):
            asked = [f"-m {module}" for module in LAUNCHER_MODULES]
            commands.write_before(folder, name, path, asked, __name__, folder, name)


def note_refusal(folder: str) -> None:
    """Note that a process was refused, also where nobody is left to ask `any_refused`."""
    with suppress(OSError):
        Path(folder, _NOTE).touch()


def any_refused(folder: str) -> bool:
    """Return whether a process of the simulation was refused."""
    return Path(folder, _NOTE).exists()


def main(folder: str, name: str, arguments: Sequence[str]) -> int:
    """Refuse to launch, and return the exit status; run what launches nothing, e.g. ``accelerate env``."""
    if found := launched([name, *arguments]):
        note_refusal(folder)
        sys.stderr.write(f"foretrain: {found.refusal('launcher', 'simulate')}\n")
        return _REFUSED
    others = [each for each in os.environ.get("PATH", os.defpath).split(os.pathsep) if each != folder]
    real = shutil.which(name, path=os.pathsep.join(others))
    if real is not None:
        os.execv(real, [real, *arguments])
    sys.stderr.write(f"{name}: not found\n")
    return _NOT_FOUND


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
