"""What the links of a lab's hosts carry, by the counters of their interfaces."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path


class LinkTraffic:
    """Bytes with headers that hosts have sent and received.

    Args:
        pids: a process on each host; its ``/proc`` entry shows the interfaces of its own network namespace.
        rate: of every link, bytes/s.
    """

    def __init__(self, pids: Sequence[int], rate: float) -> None:
        self._files = [Path(f"/proc/{pid}/net/dev") for pid in pids]
        self._rate = rate
        self._before, self._began = self._read(), time.perf_counter()

    def shares(self) -> tuple[tuple[float, float], ...]:
        """Since it was made, the shares of its link's rate that each host has sent and received."""
        most = self._rate * (time.perf_counter() - self._began)
        return tuple(
            ((sent - before[0]) / most, (received - before[1]) / most)
            for (sent, received), before in zip(self._read(), self._before, strict=True)
        )

    def _read(self) -> list[tuple[int, int]]:
        return [_counted(file.read_text()) for file in self._files]


def _counted(text: str) -> tuple[int, int]:
    """Bytes out and in of all interfaces but the loopback."""
    sent = received = 0
    for line in text.splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() != "lo":
            fields = numbers.split()
            received, sent = received + int(fields[0]), sent + int(fields[8])
    return sent, received
