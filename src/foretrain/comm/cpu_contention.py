"""Whether this machine's cores have time for communication, or compute."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_STAT = Path("/proc/stat")
_FREE = 0.7
"""A share of busy cores up to which whoever wakes finds a free one."""


class Ticks(NamedTuple):
    """Of all cores together: how long they worked, and how long there was, in the kernel's unit."""

    busy: int
    all: int

    def plus(self, began: Ticks, now: Ticks) -> Ticks:
        """With what passed between two readings of `ticks`."""
        return Ticks(self.busy + now.busy - began.busy, self.all + now.all - began.all)


def ticks() -> Ticks:
    """Since boot; zeros where no kernel says it."""
    try:
        first = _STAT.read_text(encoding="ascii").partition("\n")[0]
    except OSError:
        return Ticks(0, 0)
    # cpu user nice system idle iowait irq softirq steal guest guest_nice; the last two are in user and nice already.
    times = [int(word) for word in first.split()[1:9]]
    return Ticks(sum(times) - sum(times[3:5]), sum(times))


def crowding(spent: Ticks) -> float:
    """From 0, where whoever wakes finds a free core, to 1, where each operation takes its time from the computation."""
    busy = spent.busy / spent.all if spent.all > 0 else 0.0
    return min(1.0, max(0.0, (busy - _FREE) / (1 - _FREE)))
