"""Tells when the link has changed, whatever policy runs over it: a bandwidth monitor that only listens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from foretrain.schedule.job import CostModel
from foretrain.schedule.monitor import Monitor
from foretrain.tasks import Action, Done, Event, Start, StepBegin
from foretrain.units import Time

if TYPE_CHECKING:
    from foretrain.engine import Policy

_DRIFT = 0.2
"""The share by which the link must differ from what it was, in the median: as of Prophet's monitor."""


class Gauge:
    """Listens to one policy at a time.

    What it says is relative to what the link was under the same policy and knobs: a cost model that is a little wrong
    is wrong by more where chunks are smaller. Only what found the link busy is measured: of policies that wait for each
    chunk before they send the next, nothing. `watch` and the policy belong to an engine's thread, `taken` to all.

    Args:
        cost: what sending should take.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._changes: deque[float] = deque()

    def watch(self, policy: Policy) -> Policy:
        """``policy``, listened to."""
        return _Watched(policy, Monitor(self._cost, 0.5), self._changes.append)

    def taken(self) -> float | None:
        """How many times as long the link takes as it did, once after it has changed; else None."""
        slower = None
        while self._changes:
            slower = (slower or 1.0) * self._changes.popleft()
        return slower


class _Watched:
    """``policy``, whose chunks ``monitor`` measures."""

    def __init__(self, policy: Policy, monitor: Monitor, changed: Callable[[float], None]) -> None:
        self._policy, self._monitor, self._changed = policy, monitor, changed
        self._settled = False

    def handle(self, event: Event, now: Time) -> Sequence[Action]:
        """What the policy answers."""
        if type(event) is Done:
            self._monitor.done(now)
        elif type(event) is StepBegin:
            self._judge()
        actions = self._policy.handle(event, now)
        for action in actions:
            if type(action) is Start:
                self._monitor.start(now, action.chunk.size)
        return actions

    def _judge(self) -> None:
        before = self._monitor.usual
        if not self._monitor.judges:
            return
        if not self._settled:
            self._settled = True
            self._monitor.settle()
        elif self._monitor.drifted(_DRIFT):
            self._monitor.forget(_DRIFT)
            self._monitor.settle()
            self._changed(self._monitor.usual / before)
