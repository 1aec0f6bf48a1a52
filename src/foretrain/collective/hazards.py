"""Which steps are ordered by dependencies, and whether two that are not touch the same block.

A step happens before another if a chain of dependencies enforces that it has ended when the other one starts. Transfers
run their steps one after another, so what happened before a step is one number per transfer: a vector clock
(Lamport 1978; the bookkeeping per block is that of FastTrack, Flanagan and Freund 2009). Dependencies do not depend on
data, hence a plan without hazards in one order has none in any.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from foretrain.collective.plan import Plan
from foretrain.collective.progress import PlanProgress

_Step = tuple[int, int]


class _Clocks:
    """What has happened before each step: int16 (steps of all transfers, transfers)."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.start = np.concatenate([[0], np.cumsum(plan.steps)])
        self.known = np.zeros((self.start[-1], plan.transfers), np.int16)

    def begin(self, transfer: int, step: int) -> None:
        """Notes what a step waits for; steps begin in an order that the dependencies allow."""
        plan, row = self.plan, self.start[transfer] + step
        waits = slice(plan.first[transfer], plan.first[transfer + 1])
        after = plan.after[waits]
        until = np.minimum(plan.steps[after], step + plan.lag[waits].astype(np.int64))
        after, until = after[until > 0], until[until > 0]
        if step:
            self.known[row] = self.known[row - 1]
            self.known[row, transfer] = step
        if len(after):
            np.maximum(self.known[row], self.known[self.start[after] + until - 1].max(axis=0), out=self.known[row])
            self.known[row, after] = np.maximum(self.known[row, after], until)

    def unordered(self, earlier: Iterable[_Step], later: _Step) -> _Step | None:
        """The first of ``earlier`` that need not have ended when ``later`` starts."""
        known = self.known[self.start[later[0]] + later[1]]
        return next((one for one in earlier if known[one[0]] <= one[1]), None)


@dataclass(slots=True)
class _Block:
    """Accesses to one block at one endpoint that a later one has to come after.

    Attributes:
        before: what the adds came after: one overwriting step, or reads.
        adds: steps that have added since then.
        reads: steps that have read since then.
    """

    before: list[_Step] = field(default_factory=list)
    adds: list[_Step] = field(default_factory=list)
    reads: list[_Step] = field(default_factory=list)

    def read(self, step: _Step) -> list[_Step]:
        """Notes a read and returns what it must come after."""
        # Reads that nothing wrote to are in ``reads``; ``before`` are then only writes.
        self.reads.append(step)
        return self.adds or self.before

    def add(self, step: _Step) -> list[_Step]:
        """Notes an addition and returns what it must come after."""
        if self.reads:
            self.before, self.adds, self.reads = self.reads, [], []
        self.adds.append(step)
        return self.before

    def overwrite(self, step: _Step) -> list[_Step]:
        """Notes that it was overwritten and returns what that must come after."""
        past = self.reads + self.adds or self.before
        self.before, self.adds, self.reads = [step], [], []
        return past


def check_hazards(plan: Plan) -> str | None:
    """The first two steps found that race for a block, in words; None where there are none.

    Two steps that touch the same block at the same endpoint race if one of them writes, not both add, and neither
    must have ended when the other one starts.
    """
    clocks, progress = _Clocks(plan), PlanProgress(plan)
    memory: dict[tuple[int, int], _Block] = {}
    while not progress.finished:
        ready = progress.ready()
        for one in ready.tolist():
            step = int(progress.ended[one])
            clocks.begin(one, step)
            for block in plan.moved(one, step).tolist():
                place = memory.setdefault((int(plan.source[one]), block), _Block())
                other = clocks.unordered(place.read((one, step)), (one, step))
                if other is not None:
                    return _told(plan, (one, step), other, int(plan.source[one]), block, "reads")
                place = memory.setdefault((int(plan.target[one]), block), _Block())
                adds = step < plan.adds[one]
                past = place.add((one, step)) if adds else place.overwrite((one, step))
                other = clocks.unordered(past, (one, step))
                if other is not None:
                    verb = "adds to" if adds else "overwrites"
                    return _told(plan, (one, step), other, int(plan.target[one]), block, verb)
        progress.ended[ready] += 1
    return None


def _told(plan: Plan, one: _Step, other: _Step, endpoint: int, block: int, verb: str) -> str:
    def named(step: _Step) -> str:
        return f"step {step[1]} of transfer {step[0]} ({plan.source[step[0]]} -> {plan.target[step[0]]})"

    return f"{named(one)} {verb} block {block} at {endpoint} and does not wait for {named(other)}"
