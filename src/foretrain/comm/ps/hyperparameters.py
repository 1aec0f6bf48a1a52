"""Hyperparameters: each worker says its own, and from which of its rounds on they hold.

A worker says them on the connection on which its gradients follow, so that they are there before any push that they
apply to, and the round tells them from those of what was pushed before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from foretrain.comm.ps.frames import Malformed

Setting: TypeAlias = bool | int | float | tuple[int | float, ...] | None
"""What a hyperparameter may be."""
Group: TypeAlias = dict[str, Setting]
"""A parameter group's hyperparameters, by their names in torch.optim."""


def encode(groups: Sequence[Mapping[str, Setting]]) -> bytes:
    """As a payload; every number is finite."""
    return msgspec.json.encode(groups)


def decode(payload: bytes) -> tuple[Group, ...]:
    """From a payload; `Malformed` where it does not read."""
    try:
        return msgspec.json.decode(payload, type=tuple[Group, ...])
    except msgspec.MsgspecError as error:
        raise Malformed("rule", f"hyperparameters that do not read: {error}") from None


def finite(value: Setting) -> bool:
    """Whether it can be said: JSON has no infinity."""
    return all(math.isfinite(each) for each in (value if isinstance(value, tuple) else (value or 0,)))


class Hyperparameters:
    """What ``workers`` have said; of two rounds each, as a worker's pushes are of one round at a time."""

    def __init__(self, workers: int) -> None:
        self._said: list[list[tuple[int, tuple[Group, ...]]]] = [[] for _ in range(workers)]

    def say(self, worker: int, step: int, groups: tuple[Group, ...]) -> None:
        """From its round ``step`` on ``worker`` goes by ``groups``."""
        before = [each for each in self._said[worker] if each[0] < step]
        self._said[worker] = [*before[-1:], (step, groups)]

    def of(self, worker: int, step: int) -> tuple[Group, ...] | None:
        """By which ``worker`` goes in its round ``step``; None before it has said any."""
        return next((groups for since, groups in reversed(self._said[worker]) if since <= step), None)

    def state(self) -> list[Any]:
        """Everything, as plain numbers."""
        return [[(step, [dict(group) for group in groups]) for step, groups in said] for said in self._said]

    def restore(self, state: Sequence[Any]) -> None:
        """As it was when `state` was called."""
        self._said = [[(step, tuple(dict(group) for group in groups)) for step, groups in said] for said in state]
