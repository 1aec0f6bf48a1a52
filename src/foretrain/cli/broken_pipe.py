"""Ends what nobody reads any more."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_STDOUT = 1
_EVERY = 500
"""Milliseconds after which the watch looks whether it is still wanted."""


class ReaderGone(BaseException):
    """Nobody reads stdout any more.

    As KeyboardInterrupt it comes out of any line, so it is none of the errors that a line may expect and pass over.
    """


@contextmanager
def while_read() -> Iterator[None]:
    """Ends the block with `ReaderGone` when the reader of stdout is gone.

    A block that runs for long may write nothing in the meantime, and who has started it may be gone without a word.
    Only in the main thread; elsewhere nothing is watched.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def gone(number: int, frame: object) -> None:
        raise ReaderGone

    over = threading.Event()
    before = signal.signal(signal.SIGPIPE, gone)
    threading.Thread(target=_watch, args=(over,), daemon=True).start()
    try:
        yield
    finally:
        over.set()
        signal.signal(signal.SIGPIPE, signal.SIG_IGN if before is None else before)


def _watch(over: threading.Event) -> None:
    poll = select.poll()
    poll.register(_STDOUT, 0)  # that the other end of a pipe, socket or terminal is closed is told unasked
    while not over.is_set():
        for _, told in poll.poll(_EVERY):
            if told & (select.POLLERR | select.POLLHUP) and not over.is_set():
                os.kill(os.getpid(), signal.SIGPIPE)
            return
