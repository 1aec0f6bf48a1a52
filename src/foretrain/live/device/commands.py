"""Commands that a simulation puts before all others on the path of its scripts: modules of foretrain's."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write(folder: str, name: str, module: str, *arguments: str) -> None:
    """Write the command ``name``, which runs ``module`` with these arguments before its own, into ``folder``."""
    _write(folder, name, f'exec {_module(module, *arguments)} "$@"')


def write_before(folder: str, name: str, path: str, words: Sequence[str], module: str, *arguments: str) -> None:
    """Write the command ``name``, which is the program at ``path``, but for command lines with one of ``words``.

    These run ``module`` with ``arguments`` before their own.
    """
    patterns = "|".join(f"*{shlex.quote(word)}*" for word in words)
    asked = f'case "$*" in {patterns}) exec {_module(module, *arguments)} "$@";; esac'
    _write(folder, name, f'{asked}\nexec {shlex.quote(path)} "$@"')


def _module(name: str, *arguments: str) -> str:
    return shlex.join([sys.executable, "-m", name, *arguments])


def _write(folder: str, name: str, lines: str) -> None:
    command = Path(folder, name)
    command.write_text(f"#!/bin/sh\n{lines}\n", encoding="utf-8")
    command.chmod(0o755)


def on_path(folder: str, environment: dict[str, Any] | os._Environ[str]) -> None:
    """Put the commands before all others."""
    environment["PATH"] = f"{folder}{os.pathsep}{environment.get('PATH', os.defpath)}"
