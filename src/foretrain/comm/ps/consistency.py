"""Consistency between workers: BSP, asynchronous, or stale-synchronous, and the clocks that bound staleness.

Source: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS'13.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from foretrain.errors import ConfigError

_SSP = re.compile(r"ssp\((\d{1,9})\)")


class Consistency(NamedTuple):
    """Parsed consistency, e.g. of ``"ssp(3)"``.

    Attributes:
        apart: whether each worker's gradients are an update of their own.
        bound: steps that a worker may be ahead of the slowest; infinite where it never waits.
    """

    apart: bool
    bound: float


def consistency(text: str) -> Consistency:
    """Parse "bsp", "async", or "ssp(3)"; raise ConfigError for any other text."""
    if text == "bsp":
        return Consistency(False, 0)
    if text == "async":
        return Consistency(True, math.inf)
    if (found := _SSP.fullmatch(text)) is not None:
        return Consistency(True, int(found[1]))
    raise ConfigError("consistency", text, "is unknown", "write 'bsp', 'async', or with a bound of steps 'ssp(3)'")


class Clocks:
    """Steps of each worker that were applied, by part, and the staleness bound on them.

    Args:
        parts: their numbers.
        workers: N; their ranks are 0 to N − 1.
        bound: steps; infinite where no worker waits.
        lost: workers that count no more.
    """

    def __init__(self, parts: Iterable[int], workers: int, bound: float, lost: Iterable[int] = ()) -> None:
        self._bound = bound
        self._done = {part: [-1] * workers for part in parts}
        self.rounds = [0] * workers
        """By worker, number of its steps that were applied to all parts."""
        self._behind = [len(self._done)] * workers
        """By worker, number of parts to which its next step was not applied."""
        self._present = sorted(set(range(workers)) - set(lost))

    def done(self, worker: int, part: int) -> int:
        """Return the last step of ``worker`` that was applied to ``part``; −1 before the first."""
        return self._done[part][worker]

    def tick(self, worker: int, part: int) -> None:
        """Note that the next step of ``worker`` was applied to ``part``."""
        self._done[part][worker] += 1
        if self._done[part][worker] == self.rounds[worker]:
            self._behind[worker] -= 1
            if not self._behind[worker]:
                self.rounds[worker] += 1
                self._count(worker)

    def may_go_on(self, worker: int, part: int, step: int) -> bool:
        """Return whether ``worker`` may have the answer to ``step``: it was applied, and no other is too far behind."""
        done = self._done[part]
        if done[worker] < step:
            return False
        return min((done[other] for other in self._present), default=step) >= step - self._bound

    def behind(self, part: int, step: int) -> list[int]:
        """Return the workers for whom the answer to ``step`` of ``part`` waits."""
        return [worker for worker in self._present if self._done[part][worker] < step - self._bound]

    def waited_for(self, worker: int) -> bool:
        """Return whether others would wait for ``worker``."""
        return worker in self._present

    def leave(self, worker: int) -> None:
        """Stop waiting for ``worker``."""
        if worker in self._present:
            self._present.remove(worker)

    def state(self) -> dict[str, Any]:
        """Return everything as plain numbers."""
        return {"present": list(self._present), "done": {part: list(done) for part, done in self._done.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state` returned."""
        self._present = [worker for worker in state["present"] if worker in self._present]
        self._done = {part: list(done) for part, done in state["done"].items()}
        for worker in range(len(self.rounds)):
            self.rounds[worker] = 1 + min((done[worker] for done in self._done.values()), default=-1)
            self._count(worker)

    def _count(self, worker: int) -> None:
        self._behind[worker] = sum(done[worker] < self.rounds[worker] for done in self._done.values())
