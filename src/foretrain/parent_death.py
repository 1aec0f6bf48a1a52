"""End a process with its parent, also where the parent is killed outright.

As a script this file runs a command, and ends it and all that it has started with the parent, whose process id is its
first argument: a compiler is several processes, of which the system tells one only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

_SET_DEATH_SIGNAL = 1
"""Linux's PR_SET_PDEATHSIG."""


def end_with_parent() -> None:
    """Request SIGTERM from the system when the parent has ended; do nothing where that is not supported.

    A parent that has ended before is not noticed; `ending_with_this` runs commands that do.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)


def ending_with_this(command: Sequence[str]) -> list[str]:
    """Return the command that runs ``command``, and ends it and all of its process group with this process.

    Start it in a session of its own: at its end it kills its process group.
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def run_to_end(*commands: Sequence[str], timeout: float | None = None) -> None:
    """Run ``commands`` side by side and wait; they and what they start end with this process, and at an exception here.

    Args:
        commands: what to run.
        timeout: seconds, of each; None waits for ever.

    Raises:
        OSError: one cannot be started.
        subprocess.CalledProcessError: one failed; ``stderr`` is what it wrote.
        subprocess.TimeoutExpired: one took longer.
    """
    with contextlib.ExitStack() as stack:
        started = [(stack.enter_context(_started(command)), command) for command in commands]
        for process, command in started:
            _, errors = process.communicate(timeout=timeout)
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, command, stderr=errors)


@contextlib.contextmanager
def _started(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Start ``command``, and end all that it has started."""
    with subprocess.Popen(
        ending_with_this(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):  # all have ended, as they should
                os.killpg(process.pid, signal.SIGKILL)


def _main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    end_with_parent()
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if os.getppid() != parent:
        sys.exit("the process that has started this one ended before it could be told")
    try:
        sys.exit(subprocess.call(command))
    except OSError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    _main()
