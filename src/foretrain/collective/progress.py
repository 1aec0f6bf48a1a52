"""How far the transfers of a plan have come, and which may go on: the rule of dependencies, executed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from foretrain.collective.plan import Plan
from foretrain.errors import StallError


class PlanProgress:
    """Counts ended steps. ``ended``, int64 (transfers,), is advanced by who owns the progress.

    Attributes:
        ended: steps of each transfer that have ended.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ended = np.zeros(plan.transfers, np.int64)
        self._waiter = plan.waiter
        self._most = plan.steps[plan.after]
        self._lag = plan.lag.astype(np.int64)

    @property
    def finished(self) -> bool:
        """Whether all steps of all transfers have ended."""
        return bool((self.ended == self.plan.steps).all())

    def _lacking(self) -> NDArray[np.bool_]:
        """For each dependency, whether its waiter's next step has to wait for it."""
        return self.ended[self.plan.after] < np.minimum(self._most, self.ended[self._waiter] + self._lag)

    def ready(self) -> NDArray[np.int64]:
        """The transfers whose next step may start, or has started.

        Raises:
            StallError: there is none, and not all have finished.
        """
        may = self.ended < self.plan.steps
        unfinished = may.any()
        may[self._waiter[self._lacking()]] = False
        if unfinished and not may.any():
            raise StallError(f"{self.plan.name} {self.plan.operation}: transfers wait for each other", self._waits())
        return np.flatnonzero(may)

    def _waits(self) -> list[str]:
        plan, unfinished = self.plan, self.ended < self.plan.steps

        def told(one: int) -> str:
            return f"transfer {one} ({plan.source[one]} -> {plan.target[one]})"

        held = np.flatnonzero(self._lacking() & unfinished[self._waiter])
        return [
            f"{told(self._waiter[i])} at step {self.ended[self._waiter[i]]} of {plan.steps[self._waiter[i]]} waits for"
            f" {told(plan.after[i])} at {self.ended[plan.after[i]]} of {plan.steps[plan.after[i]]}"
            for i in held.tolist()
        ]


def rounds(plan: Plan) -> Iterator[NDArray[np.int64]]:
    """The transfers that make a step in each round of a world in which every step takes 1 and starts at once.

    Complexity: one sweep over the dependencies a round.
    """
    progress = PlanProgress(plan)
    while not progress.finished:
        ready = progress.ready()
        yield ready
        progress.ended[ready] += 1


def steps_on_critical_path(plan: Plan) -> int:
    """The longest chain of steps that wait for each other: the α that an algorithm costs."""
    return sum(1 for _ in rounds(plan))
