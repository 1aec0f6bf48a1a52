"""Processes that tests start beside themselves."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any


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
