"""Commands that a simulation puts before all others on the path of its scripts: modules of foretrain's."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any


def write(folder: str, name: str, module: str, *arguments: str) -> None:
    """Write the command ``name``, which runs ``module`` with these arguments before its own, into ``folder``."""
    command = Path(folder, name)
    begin = shlex.join([sys.executable, "-m", module, *arguments])
    command.write_text(f'#!/bin/sh\nexec {begin} "$@"\n', encoding="utf-8")
    command.chmod(0o755)


def on_path(folder: str, environment: dict[str, Any] | os._Environ[str]) -> None:
    """Put the commands before all others."""
    environment["PATH"] = f"{folder}{os.pathsep}{environment.get('PATH', os.defpath)}"
