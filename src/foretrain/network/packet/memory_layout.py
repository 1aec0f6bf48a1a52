"""A memory that is made of parts, each of which knows where it will begin."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LINE = 8
"""Rows are aligned to so many numbers: a line of the cache."""


class Parts:
    """Takes parts, and says where each will begin.

    Args:
        first: where the first one does.
    """

    def __init__(self, first: int) -> None:
        self._first = self.end = first
        self._parts: list[NDArray[np.int64]] = []

    def add(self, part: NDArray[np.int64]) -> int:
        """Where ``part`` begins, whose rows are aligned. It can be changed until `whole`."""
        at = self.end
        self._parts.append(part)
        self.end += -(-part.size // LINE) * LINE
        return at

    def whole(self) -> NDArray[np.int64]:
        """All of it, (end − first,)."""
        made, at = np.zeros(self.end - self._first, np.int64), 0
        for part in self._parts:
            made[at : at + part.size] = part.ravel()
            at += -(-part.size // LINE) * LINE
        return made


class Extents:
    """Parts of a memory that nothing is in, sorted: (first, size)."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []

    def take(self, size: int) -> int | None:
        """Where ``size`` numbers fit first, which are then no longer free; None if nowhere."""
        for k, (first, has) in enumerate(self._free):
            if has >= size:
                self._free[k : k + 1] = [(first + size, has - size)] if has > size else []
                return first
        return None

    def give(self, first: int, size: int) -> None:
        """``size`` numbers from ``first`` on are free; what is free beside them becomes one with them."""
        merged: list[tuple[int, int]] = []
        for at, has in sorted([*self._free, (first, size)]):
            if merged and sum(merged[-1]) == at:
                merged[-1] = merged[-1][0], merged[-1][1] + has
            else:
                merged.append((at, has))
        self._free = merged
