"""End a process with its parent, also where the parent is killed outright.

As a script this file runs a command, and ends it and all that it has started with the parent: a compiler is several
processes, of which the system tells one only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

_SET_DEATH_SIGNAL = 1
"""Linux's PR_SET_PDEATHSIG."""


def end_with_parent() -> None:
    """Request SIGTERM from the system when the parent has ended; do nothing where that is not supported."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)


def run_to_end(command: Sequence[str], *, timeout: float | None = None) -> None:
    """Run ``command`` and wait; neither it nor what it starts outlives this process, or an exception here.

    Args:
        timeout: seconds; None waits for ever.

    Raises:
        OSError: it cannot be started.
        subprocess.CalledProcessError: it failed; ``stderr`` is what it wrote.
        subprocess.TimeoutExpired: it took longer.
    """
    started = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with started:
        try:
            _, errors = started.communicate(timeout=timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):  # all have ended, as they should
                os.killpg(started.pid, signal.SIGKILL)
    if started.returncode:
        raise subprocess.CalledProcessError(started.returncode, command, stderr=errors)


def _main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    end_with_parent()
    try:
        sys.exit(subprocess.call(sys.argv[1:]))
    except OSError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    _main()
