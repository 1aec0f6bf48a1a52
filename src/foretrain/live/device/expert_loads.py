"""Loads that routers of experts would give, for they hang on values that no simulated GPU computes.

# Note [Loads of experts]
The shares of a router's experts are drawn by seed, router and step of the optimizer: independent of the rank, so that
ranks which exchange tokens agree, and of the micro-batch, so that a recomputed router chooses as it did before. A
router is the innermost module around its ``topk`` (or ``argmax``), or that line where there is no module. Routers are
numbered in the order in which a rank first counts what they chose, after those of the pipeline's stages before it
(Note [Routers of a pipeline] in `foretrain.live.routed_loads`). No expert gets a token twice: its share is at most one
over the experts of each token, and what is above goes to the others.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Sequence
from types import FrameType, ModuleType
from typing import NamedTuple

from torch import nn

from foretrain.errors import ConfigError
from foretrain.live.device.script import script_line
from foretrain.live.device.settings import ExpertLoads
from foretrain.live.event_log import EXPERTS, LOADS


class Draw(NamedTuple):
    """Choice of a router in one step of the optimizer."""

    router: object
    step: int


class Routers:
    """Routers of one rank, asked by the simulated device; see Note [Loads of experts].

    Args:
        loads: of the experts.
        before: routers of the stages before this rank's.

    Attributes:
        step: of the optimizer, counted from 0.
    """

    def __init__(self, device: ModuleType, loads: ExpertLoads, before: int = 0) -> None:
        self.step = 0
        self._device, self._loads, self._before = device, loads, before
        self._draws: list[Draw] = []
        self._numbers: dict[Draw, int] = {}
        self._order: dict[object, int] = {}
        self._weights: dict[tuple[int, int, int], Sequence[float]] = {}

    def install(self) -> None:
        """Have the device ask."""
        self._device.set_routers(self.draw, self.counts)

    def draw(self) -> int:
        """Return the number, from 1, of the draw of the router that is choosing now."""
        draw = Draw(_router(), self.step)
        number = self._numbers.get(draw)
        if number is None:
            self._draws.append(draw)
            number = self._numbers[draw] = len(self._draws)
        return number

    def counts(self, number: int, experts: int, total: int, top: int) -> list[int]:
        """Return how many of ``total`` choices, ``top`` for each token, each expert gets in a draw."""
        draw = self._draws[number - 1]
        router = self._order.setdefault(draw.router, len(self._order))
        key = self._before + router, draw.step, experts
        known = key in self._weights
        if not known:
            try:
                self._weights[key] = self._loads.weights(*key)
            except ConfigError as error:
                wrong = [error.field, str(error.value), error.problem, error.remedy]
                self._device.note(EXPERTS, 0, 0, json.dumps(wrong).encode())
                raise
        counts = apportion(self._weights[key], total, total // max(top, 1))
        if not known and total:
            self._device.note(LOADS, router, 0, json.dumps(max(counts) * experts / total).encode())
        return counts

    @property
    def found(self) -> int:
        """Return the number of routers whose choices were counted."""
        return len(self._order)


def _router() -> object:
    """Return what identifies the router that is choosing: the innermost module, else the script's line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and isinstance(module := frame.f_locals.get(code.co_varnames[0]), nn.Module):
            return id(module)
        frame = frame.f_back
    return script_line()


def apportion(weights: Sequence[float], total: int, most: int) -> list[int]:
    """Share ``total`` in proportion to ``weights``, in whole numbers, the largest remainders rounded up.

    No share is more than ``most``, unless all together could not take ``total`` then.
    """
    quotas = _quotas(weights, total, most if most * len(weights) >= total else total)
    counts = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(counts)), key=lambda k: (counts[k] - quotas[k], k))
    for k in itertools.islice(itertools.cycle(by_remainder), total - sum(counts)):
        counts[k] += 1
    return counts


def _quotas(weights: Sequence[float], total: int, most: int) -> list[float]:
    """Return the shares as fractions; what is above ``most`` goes to the others."""
    full: set[int] = set()
    while True:
        left = total - most * len(full)
        whole = math.fsum(weight for k, weight in enumerate(weights) if k not in full)
        if not whole:  # experts with loads are full, and the others have none
            others = max(len(weights) - len(full), 1)
            return [float(most) if k in full else left / others for k in range(len(weights))]
        quotas = [float(most) if k in full else left * weight / whole for k, weight in enumerate(weights)]
        above = {k for k, quota in enumerate(quotas) if quota > most}
        if not above:
            return quotas
        full |= above
