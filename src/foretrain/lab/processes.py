"""What runs inside a lab: found by its network namespace, ended by pidfd; and signals held back while that goes on."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

NAMESPACES = Path("/run/netns")


@dataclass(frozen=True, slots=True)
class Process:
    """A process that lives inside a lab."""

    pid: int
    command: str
    host: int | None
    """None is the switch."""


def inside(namespaces: Mapping[str, int | None]) -> tuple[Process, ...]:
    """The processes inside ``namespaces``, names with the index of their host, by pid: one walk through /proc."""
    inodes: dict[tuple[int, int], int | None] = {}
    for namespace, host in namespaces.items():
        with contextlib.suppress(OSError):
            found = (NAMESPACES / namespace).stat()
            inodes[found.st_dev, found.st_ino] = host
    alive: list[Process] = []
    for entry in os.scandir("/proc") if inodes else ():
        if entry.name.isdigit():
            # A process may end between any two looks at it.
            with contextlib.suppress(OSError):
                seen = os.stat(f"{entry.path}/ns/net")
                if (seen.st_dev, seen.st_ino) in inodes:
                    words = Path(entry.path, "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ")
                    command = words.decode(errors="replace")
                    alive.append(Process(int(entry.name), command, inodes[seen.st_dev, seen.st_ino]))
    return tuple(sorted(alive, key=lambda process: process.pid))


def end(find: Callable[[], Iterable[Process]], patience: float = 3.0) -> None:
    """Ends the processes that ``find`` names: SIGTERM, and after ``patience`` seconds SIGKILL.

    Each is held by a pidfd that is opened before ``find`` confirms it by a second look, so that a pid which the
    system gave to somebody else meanwhile is never signalled.
    """
    # What forked between two looks is found by the next round; what survives three, no signal can end.
    for _ in range(3):
        if not (found := tuple(find())):
            return
        held: dict[int, int] = {}
        try:
            for process in found:
                with contextlib.suppress(ProcessLookupError):
                    held[process.pid] = os.pidfd_open(process.pid)
            waiting = {held[process.pid] for process in find() if process.pid in held}
            for number in (signal.SIGTERM, signal.SIGKILL):
                for descriptor in waiting:
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(descriptor, number)
                waiting = _not_ended(waiting, patience)
        finally:
            for descriptor in held.values():
                os.close(descriptor)


def _not_ended(descriptors: set[int], patience: float) -> set[int]:
    waiting, deadline = set(descriptors), time.monotonic() + patience
    poll = select.poll()
    for descriptor in waiting:
        poll.register(descriptor, select.POLLIN)
    while waiting and (left := deadline - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(math.ceil(left * 1000)):
            poll.unregister(descriptor)
            waiting.discard(descriptor)
    return waiting


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds Ctrl-C and SIGTERM back until the block is done: tidying up is never half done. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    for number in came[:1]:
        signal.raise_signal(number)
