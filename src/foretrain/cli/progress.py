"""Progress of a command on stderr: a bar with an ETA in a terminal, lines now and then in a log; and what ends it."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_EVERY = 30.0
"""Seconds between two lines of a log."""
_STDOUT = 1
_POLL_INTERVAL = 500
"""Milliseconds after which `_watch` checks whether the block has ended."""


def bars(*, percent: bool = False, **options: Any) -> Progress:
    """Return bars on stderr with description, progress and time left, which vanish at the end."""
    from rich import progress
    from rich.console import Console

    amount = progress.TaskProgressColumn() if percent else progress.MofNCompleteColumn()
    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), amount, progress.TimeRemainingColumn())
    return progress.Progress(*columns, console=Console(stderr=True), transient=True, **options)


def _in_terminal() -> bool:
    from rich.console import Console

    return Console(stderr=True).is_terminal


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[str, float, float], None]]:
    """Show a bar whose callback takes the next item, the number done and the total; nothing outside a terminal."""
    # Disabled, because a transient bar leaves an empty line in a log.
    with bars(disable=not _in_terminal()) as bar:
        task = bar.add_task(title, total=None)
        yield lambda what, done, total: bar.update(
            task, description=f"{title}: {what}" if what else title, completed=done, total=total
        )


@contextmanager
def percent_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar in percent whose callback takes the number done and the total; nothing outside a terminal."""
    with bars(percent=True, disable=not _in_terminal()) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def counter(title: str, things: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar that counts ``things`` for minutes or hours; outside a terminal write `Lines` instead."""
    if not _in_terminal():
        yield Lines(things)
        return
    # Results come in batches, so that an estimate from the last few would jump.
    with bars(speed_estimate_period=60) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def searching() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar whose callback takes what is under way, the number done and the total; `Lines` outside a terminal."""
    if not _in_terminal():
        lines = Lines("simulations")
        yield lambda what, done, total: lines(done, total)
        return
    with bars(speed_estimate_period=60) as bar:
        task = bar.add_task("searching", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


@contextmanager
def stages(every: float = _EVERY) -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar for each kind of things; the callback takes the kind, the number done and the total, from 0 on.

    Outside a terminal write `Lines` of each, at most each ``every`` seconds.
    """
    if not _in_terminal():
        lines: dict[str, Lines] = {}

        def write(things: str, done: int, total: int) -> None:
            lines.setdefault(things, Lines(things, every))(done, total)

        yield write
        return
    with bars() as bar:
        tasks: dict[str, TaskID] = {}

        def show(things: str, done: int, total: int) -> None:
            if things not in tasks:
                tasks[things] = bar.add_task(things)
            bar.update(tasks[things], completed=done, total=total)

        yield show


class Lines:
    """Writer of progress to stderr, at most each ``every`` seconds: how many ``things`` are done, and the time left."""

    def __init__(self, things: str, every: float = _EVERY) -> None:
        self._things, self._every = things, every
        self._began = self._written = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Report that ``done`` of ``total`` are done."""
        now = time.monotonic()
        if not done or now - self._written < self._every:
            return
        self._written = now
        left = timedelta(seconds=round((now - self._began) * (total - done) / done))
        sys.stderr.write(f"foretrain: {done:,} of {total:,} {self._things}, {left} left\n")


def end_interrupted() -> NoReturn:
    """Say that Ctrl-C has ended the command, and exit with 130."""
    complain("interrupted; no file was left half written")
    sys.exit(130)


def complain(message: str) -> None:
    """Write why the command ends on stderr; where that is full or closed, its exit status alone says it."""
    with suppress(OSError, AttributeError):  # Python has no stderr where that is closed
        sys.stderr.write(f"foretrain: {message}\n")


class Terminated(SystemExit):
    """Raised by SIGTERM: no exit of a user's script, in whose code it may come."""


class StdoutClosed(BaseException):
    """Raised when the reader of stdout has ended; like KeyboardInterrupt it may come out of any line."""


@contextmanager
def end_with_reader() -> Iterator[None]:
    """End the block with `StdoutClosed` when the reader of stdout is gone.

    A long block may write nothing in the meantime, and would not notice that the program which started it has ended.
    Only in the main thread; elsewhere nothing is watched.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_closed(number: int, frame: object) -> None:
        raise StdoutClosed

    over = threading.Event()
    before = signal.signal(signal.SIGPIPE, raise_closed)
    threading.Thread(target=_watch, args=(over,), daemon=True).start()
    try:
        yield
    finally:
        over.set()
        signal.signal(signal.SIGPIPE, signal.SIG_IGN if before is None else before)


def _watch(over: threading.Event) -> None:
    poll = select.poll()
    poll.register(_STDOUT, 0)  # the kernel reports a closed pipe, socket or terminal whatever events are asked for
    while not over.is_set():
        for _, events in poll.poll(_POLL_INTERVAL):
            if events & (select.POLLERR | select.POLLHUP) and not over.is_set():
                os.kill(os.getpid(), signal.SIGPIPE)
            return
