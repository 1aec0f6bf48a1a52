"""Who may go on: how far each worker has come with each part, and how far ahead of the slowest that lets it go.

A worker's step is over when every part of it has been answered. So it is enough to hold back the answer of each part:
whoever begins step c + 1 has seen for every part that all others had their step c − s applied there, and is no more
than s steps ahead of any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class Clocks:
    """Of ``workers`` and the parts with these numbers.

    Args:
        parts: their numbers.
        workers: N; their ranks are 0 to N − 1.
        bound: s; infinite where nobody waits.
        lost: those for whom nobody waits.
    """

    def __init__(self, parts: Iterable[int], workers: int, bound: float, lost: Iterable[int] = ()) -> None:
        self._bound = bound
        self._done = {part: [-1] * workers for part in parts}
        self.rounds = [0] * workers
        """By worker, how many of its steps were applied to all parts."""
        self._behind = [len(self._done)] * workers
        """By worker, to how many parts the step after those was not."""
        self._present = sorted(set(range(workers)) - set(lost))

    def done(self, worker: int, part: int) -> int:
        """The last step of ``worker`` that was applied to ``part``; −1 before the first."""
        return self._done[part][worker]

    def tick(self, worker: int, part: int) -> None:
        """The next step of ``worker`` was applied to ``part``."""
        self._done[part][worker] += 1
        if self._done[part][worker] == self.rounds[worker]:
            self._behind[worker] -= 1
            if not self._behind[worker]:
                self.rounds[worker] += 1
                self._count(worker)

    def may_go_on(self, worker: int, part: int, step: int) -> bool:
        """Whether ``worker`` may have the answer to ``step``: that was applied, and nobody is too far behind."""
        done = self._done[part]
        if done[worker] < step:
            return False
        return min((done[other] for other in self._present), default=step) >= step - self._bound

    def behind(self, part: int, step: int) -> list[int]:
        """For whom the answer to ``step`` of ``part`` waits."""
        return [worker for worker in self._present if self._done[part][worker] < step - self._bound]

    def waited_for(self, worker: int) -> bool:
        """Whether others would wait for ``worker``."""
        return worker in self._present

    def leave(self, worker: int) -> None:
        """Nobody waits for ``worker`` any more."""
        if worker in self._present:
            self._present.remove(worker)

    def state(self) -> dict[str, Any]:
        """Everything, as plain numbers."""
        return {"present": list(self._present), "done": {part: list(done) for part, done in self._done.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """As it was when `state` was called."""
        self._present = [worker for worker in state["present"] if worker in self._present]
        self._done = {part: list(done) for part, done in state["done"].items()}
        for worker in range(len(self.rounds)):
            self.rounds[worker] = 1 + min((done[worker] for done in self._done.values()), default=-1)
            self._count(worker)

    def _count(self, worker: int) -> None:
        self._behind[worker] = sum(done[worker] < self.rounds[worker] for done in self._done.values())
