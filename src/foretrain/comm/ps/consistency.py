"""Consistency between workers: BSP, asynchronous, or stale-synchronous, and the clocks that bound staleness; and each
worker's hyperparameters, where optimizers run on servers.

Source: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS'13.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from foretrain.comm.ps.frames import Malformed
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


Setting: TypeAlias = bool | int | float | tuple[int | float, ...] | None
"""Value of a hyperparameter."""
Group: TypeAlias = dict[str, Setting]
"""A parameter group's hyperparameters, by their names in torch.optim."""


def encode_groups(groups: Sequence[Mapping[str, Setting]]) -> bytes:
    """Return ``groups`` as a payload; every number is finite."""
    return msgspec.json.encode(groups)


def decode_groups(payload: bytes) -> tuple[Group, ...]:
    """Return the groups in a payload; `Malformed` if it cannot be parsed."""
    try:
        return msgspec.json.decode(payload, type=tuple[Group, ...])
    except msgspec.MsgspecError as error:
        raise Malformed("rule", f"hyperparameters that do not read: {error}") from None


def finite(value: Setting) -> bool:
    """Return whether ``value`` can be encoded: JSON has no infinity."""
    return all(math.isfinite(each) for each in (value if isinstance(value, tuple) else (value or 0,)))


class Hyperparameters:
    """Latest hyperparameters of each of ``workers``, and the first of its rounds in which they hold.

    A worker sends them on the connection of its gradients, so that they arrive before any push that they apply to, and
    the round separates them from those of earlier pushes. Two are kept, as pushes are of one round at a time.
    """

    def __init__(self, workers: int) -> None:
        self._latest: list[list[tuple[int, tuple[Group, ...]]]] = [[] for _ in range(workers)]

    def say(self, worker: int, step: int, groups: tuple[Group, ...]) -> None:
        """Use ``groups`` for ``worker`` from its round ``step`` on."""
        before = [each for each in self._latest[worker] if each[0] < step]
        self._latest[worker] = [*before[-1:], (step, groups)]

    def of(self, worker: int, step: int) -> tuple[Group, ...] | None:
        """Return the groups that hold for ``worker`` in its round ``step``; None before it has sent any."""
        return next((groups for since, groups in reversed(self._latest[worker]) if since <= step), None)

    def state(self) -> list[Any]:
        """Return everything as plain numbers."""
        return [[(step, [dict(group) for group in groups]) for step, groups in said] for said in self._latest]

    def restore(self, state: Sequence[Any]) -> None:
        """Restore the state that `state` returned."""
        self._latest = [[(step, tuple(dict(group) for group in groups)) for step, groups in said] for said in state]
