"""End a process with its parent, also where the parent is killed outright."""

from __future__ import annotations

import contextlib
import ctypes
import signal

_SET_DEATH_SIGNAL = 1
"""Linux's PR_SET_PDEATHSIG."""


def end_with_parent() -> None:
    """Request SIGTERM from the system when the parent has ended; do nothing where that is not supported."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
