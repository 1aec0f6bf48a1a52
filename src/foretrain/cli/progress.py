"""How far a command is, on stderr: a bar with an ETA for who watches, and now and then a line for a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

_EVERY = 30.0
"""Seconds between two lines of a log."""


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar that says what comes next, gone when done; nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    # Disabled, because what is transient leaves an empty line in a log.
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda what, done, total: bar.update(task, description=f"{title}: {what}", completed=done, total=total)


@contextmanager
def counter(title: str, things: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that counts ``things`` for minutes or hours, gone when done; where stderr is no terminal, `Lines`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield Lines(things)
        return
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Results come in batches, so that an estimate from the last few would jump.
    with Progress(*columns, console=console, transient=True, speed_estimate_period=60) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class Lines:
    """Writes to stderr, at most each ``every`` seconds, how many of the ``things`` are done and when all will be."""

    def __init__(self, things: str, every: float = _EVERY) -> None:
        self._things, self._every = things, every
        self._began = self._said = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """``done`` of ``total`` are."""
        now = time.monotonic()
        if not done or now - self._said < self._every:
            return
        self._said = now
        left = timedelta(seconds=round((now - self._began) * (total - done) / done))
        sys.stderr.write(f"foretrain: {done:,} of {total:,} {self._things}, {left} left\n")
