"""Arrival times of gradients over the last steps, and the blocks they form (Prophet, ICPP'21, §3-4).

A *block* is the gradients that leave the backward pass at nearly the same instant. Frameworks aggregate and schedule,
so gradients appear in steps and not one by one. Prophet sends block by block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from foretrain.schedule.monitor import quantile
from foretrain.units import Time


def blocks(releases: Sequence[Time], factor: float = 2.0) -> tuple[tuple[int, ...], ...]:
    """Indices of ``releases`` in release order, cut where the gap to the next exceeds ``factor`` times the mean gap.

    Gradients released together keep their given order. The comparison is exact, so scaling all times changes nothing.
    The mean is over all gaps, also the empty ones, as in the authors' code. O(n log n).
    """
    if not releases:
        return ()
    order = sorted(range(len(releases)), key=releases.__getitem__)
    numerator, denominator = float(factor).as_integer_ratio()
    limit = numerator * (releases[order[-1]] - releases[order[0]])
    gaps = len(order) - 1
    found = [[order[0]]]
    for before, after in pairwise(order):
        if (releases[after] - releases[before]) * gaps * denominator > limit:
            found.append([])
        found[-1].append(after)
    return tuple(tuple(block) for block in found)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The steps in which gradients arrive.

    Attributes:
        of: block of each task.
        sizes: tasks per block.
        durations: per block, from its first to its last arrival.
        intervals: A_k per block but the last, from its last arrival to the first of the next.
    """

    of: tuple[int, ...]
    sizes: tuple[int, ...]
    durations: tuple[Time, ...]
    intervals: tuple[Time, ...]


class Arrivals:
    """The last ``steps`` steps' arrival times of ``count`` tasks."""

    def __init__(self, count: int, steps: int) -> None:
        self._count = count
        self._steps: deque[list[Time]] = deque(maxlen=steps)
        self._current: dict[int, Time] = {}
        self._began: Time = 0

    def begin(self, now: Time) -> None:
        """Begin a backward pass; keep the previous one if every task arrived in it."""
        if len(self._current) == self._count:
            self._steps.append([self._current[i] for i in range(self._count)])
        self._current.clear()
        self._began = now

    def note(self, task: int, now: Time) -> None:
        """Record that ``task`` is ready."""
        self._current[task] = now - self._began

    @property
    def complete(self) -> bool:
        """Return whether all steps asked for have been seen."""
        return len(self._steps) == self._steps.maxlen

    def off(self, adopted: Sequence[Time], tolerance: float) -> bool:
        """Return whether arrivals have moved away from ``adopted`` by more than ``tolerance`` of it, all taken
        together.
        """
        moved = sum(abs(new - old) for new, old in zip(self.medians(), adopted, strict=True))
        return moved > tolerance * sum(adopted)

    def medians(self) -> list[Time]:
        """Median arrival of each task."""
        return [int(median(times)) for times in zip(*self._steps, strict=True)]

    def blocks(self, factor: float, share: float) -> Blocks:
        """Blocks of the median step; durations and intervals at the low quantile ``share`` of all steps."""
        found = blocks(self.medians(), factor)
        of = [0] * self._count
        for place, members in enumerate(found):
            for task in members:
                of[task] = place
        spans = [[(min(step[i] for i in b), max(step[i] for i in b)) for b in found] for step in self._steps]
        durations = [quantile((s[k][1] - s[k][0] for s in spans), share) for k in range(len(found))]
        intervals = [quantile((max(0, s[k + 1][0] - s[k][1]) for s in spans), share) for k in range(len(found) - 1)]
        return Blocks(tuple(of), tuple(len(b) for b in found), tuple(map(int, durations)), tuple(map(int, intervals)))
