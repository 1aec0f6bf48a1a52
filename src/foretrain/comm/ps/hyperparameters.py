"""Hyperparameters of each worker, and the first of its rounds in which they hold.

A worker sends them on the connection of its gradients, so that they arrive before any push that they apply to, and the
round separates them from those of earlier pushes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from foretrain.comm.ps.frames import Malformed

Setting: TypeAlias = bool | int | float | tuple[int | float, ...] | None
"""Value of a hyperparameter."""
Group: TypeAlias = dict[str, Setting]
"""A parameter group's hyperparameters, by their names in torch.optim."""


def encode(groups: Sequence[Mapping[str, Setting]]) -> bytes:
    """Return ``groups`` as a payload; every number is finite."""
    return msgspec.json.encode(groups)


def decode(payload: bytes) -> tuple[Group, ...]:
    """Return the groups in a payload; `Malformed` if it cannot be parsed."""
    try:
        return msgspec.json.decode(payload, type=tuple[Group, ...])
    except msgspec.MsgspecError as error:
        raise Malformed("rule", f"hyperparameters that do not read: {error}") from None


def finite(value: Setting) -> bool:
    """Return whether ``value`` can be encoded: JSON has no infinity."""
    return all(math.isfinite(each) for each in (value if isinstance(value, tuple) else (value or 0,)))


class Hyperparameters:
    """Latest hyperparameters of each of ``workers``: of two rounds, as pushes are of one round at a time."""

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
