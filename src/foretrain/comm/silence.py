"""How long others have been silent, as far as who listens for them can tell."""

from __future__ import annotations

import time

FAILURE_GRACE = 2.0
"""Seconds that a failed collective waits for a better explanation: the links know which rank it was."""


class SilenceDetector:
    """Since when a thread has listened without dozing off.

    A process that was stopped or starved, or whose machine was paused, wakes up to find that nobody has said anything
    for a while: it has not listened, and the others may have slept as long. Silence counts from then on only. A thread
    that dozes off again and again calls nobody silent; who is gone then shows by a link that broke.

    Args:
        allowed: seconds that others may be silent. A thread that listens comes round in far less than a quarter.
    """

    def __init__(self, allowed: float) -> None:
        self._allowed = allowed
        self._since = self._latest = time.monotonic()

    def come_round(self) -> float:
        """To be called in every round of the thread's loop, after it has listened: the time, in seconds."""
        now = time.monotonic()
        if now - self._latest > self._allowed / 4:
            self._since = now
        self._latest = now
        return now

    def too_long(self, heard: float) -> float | None:
        """Seconds of silence of whom was ``heard`` last then, where they are more than allowed."""
        silent = self._latest - max(heard, self._since)
        return silent if silent > self._allowed else None
