"""Processes that tests start, and files outside of packages that they import."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


def foretrain(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Return how the command ended that a user types, with its output."""
    environment = os.environ | {"COLUMNS": "160", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "foretrain", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=900, **options)


def module_at(path: Path) -> ModuleType:
    """Import the file at ``path``, which is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process that ``command`` starts, waited for at the end of the block; where the block fails, killed at once.

    Popen's own context manager would wait without an end for a process that the block was to end, and so hide what
    failed.
    """
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise
