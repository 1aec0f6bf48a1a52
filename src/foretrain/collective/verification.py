"""Proof of a plan on data: every rank ends with what the operation promises, in every order and timing.

Two parts check each other. `check_hazards` shows that any two steps that touch the same block, unless both only read or
both only add, happen in an order that the dependencies enforce; hence all orders and timings that they allow leave the
same data. `play` shows for one of them, drawn at random, that this data is right.

A step happens before another if a chain of dependencies enforces that it has ended when the other one starts. Transfers
run their steps one after another, so what happened before a step is one number per transfer: a vector clock
(Lamport 1978; the bookkeeping per block is that of FastTrack, Flanagan and Freund 2009). Dependencies do not depend on
data, hence a plan without hazards in one order has none in any.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from foretrain.collective.plan import Plan, PlanProgress
from foretrain.errors import ForetrainError

_Step = tuple[int, int]


class _Clocks:
    """Vector clocks: how many steps have ended before each step, int16 (steps of all transfers, transfers)."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.start = np.concatenate([[0], np.cumsum(plan.steps)])
        self.known = np.zeros((self.start[-1], plan.transfers), np.int16)

    def begin(self, transfer: int, step: int) -> None:
        """Note what a step waits for; steps begin in an order that the dependencies allow."""
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
        """Return the first of ``earlier`` that need not have ended when ``later`` starts."""
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
        """Note a read and return what it must come after."""
        # Reads that nothing wrote to are in ``reads``; ``before`` are then only writes.
        self.reads.append(step)
        return self.adds or self.before

    def add(self, step: _Step) -> list[_Step]:
        """Note an addition and return what it must come after."""
        if self.reads:
            self.before, self.adds, self.reads = self.reads, [], []
        self.adds.append(step)
        return self.before

    def overwrite(self, step: _Step) -> list[_Step]:
        """Note an overwriting step and return what it must come after."""
        past = self.reads + self.adds or self.before
        self.before, self.adds, self.reads = [step], [], []
        return past


def check_hazards(plan: Plan) -> str | None:
    """Describe the first two steps found that race for a block; None where there are none.

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
                    return _race(plan, (one, step), other, int(plan.source[one]), block, "reads")
                place = memory.setdefault((int(plan.target[one]), block), _Block())
                adds = step < plan.adds[one]
                past = place.add((one, step)) if adds else place.overwrite((one, step))
                other = clocks.unordered(past, (one, step))
                if other is not None:
                    verb = "adds to" if adds else "overwrites"
                    return _race(plan, (one, step), other, int(plan.target[one]), block, verb)
        progress.ended[ready] += 1
    return None


def _race(plan: Plan, one: _Step, other: _Step, endpoint: int, block: int, verb: str) -> str:
    def named(step: _Step) -> str:
        return f"step {step[1]} of transfer {step[0]} ({plan.source[step[0]]} -> {plan.target[step[0]]})"

    return f"{named(one)} {verb} block {block} at {endpoint} and does not wait for {named(other)}"


class PlanError(ForetrainError):
    """A plan does not do what its operation promises; says which rank lacks or repeats which part of which block."""


def verify(plan: Plan, *, seed: int = 0) -> None:
    """Raise unless ``plan`` keeps its promise whatever the order and timing.

    Takes time and memory in proportion to steps × transfers; up to 64 ranks, and 128 in rings, take seconds.

    Args:
        plan: any.
        seed: of the one order in which data is moved.

    Raises:
        PlanError: a block is incomplete, counted twice or undefined; or two steps race for it.
        StallError: transfers wait for each other.
    """
    race = check_hazards(plan)
    if race:
        raise PlanError(f"{plan.name} {plan.operation} of {plan.ranks} ranks: {race}")
    expect(plan, play(plan, seed=seed))


def initial(plan: Plan) -> NDArray[np.int16]:
    """Return how often each contributor is in each block at the start: (endpoints, blocks, contributors + 1).

    The last column marks what was never defined: what a rank holds of blocks that others bring.
    """
    endpoints, blocks = plan.ranks + plan.helpers, np.arange(plan.blocks)
    holds = np.zeros((endpoints, plan.blocks, endpoints + 1), np.int16)
    everyone = np.arange(plan.ranks)
    if plan.operation in ("all_reduce", "reduce_scatter"):
        holds[everyone, :, everyone] = 1
    else:
        holds[: plan.ranks, :, -1] = 1
        holds[plan.owner, blocks] = 0
        holds[plan.owner, blocks, plan.owner] = 1
    return holds


def play(plan: Plan, *, seed: int = 0) -> NDArray[np.int16]:
    """Return what every endpoint holds after a run in random order with many steps in flight; shaped as `initial`.

    A step reads when it starts and writes when it ends, and any subset of what may happen next happens.
    """
    draw, progress = random.Random(seed), PlanProgress(plan)
    holds = initial(plan)
    under_way: dict[int, tuple[NDArray[np.int64], NDArray[np.int16]]] = {}
    while not progress.finished:
        starting, ending = draw.choice((0.1, 0.5, 1.0)), draw.choice((0.1, 0.5, 1.0))
        for one in progress.ready().tolist():
            if one not in under_way and draw.random() <= starting:
                blocks = plan.moved(one, int(progress.ended[one]))
                under_way[one] = blocks, holds[plan.source[one], blocks]
        for one in draw.sample(sorted(under_way), len(under_way)):
            if draw.random() <= ending:
                blocks, data = under_way.pop(one)
                if progress.ended[one] < plan.adds[one]:
                    holds[plan.target[one], blocks] += data
                else:
                    holds[plan.target[one], blocks] = data
                progress.ended[one] += 1
    return holds


def expect(plan: Plan, holds: NDArray[np.int16]) -> None:
    """Raise PlanError unless ``holds``, shaped as `initial`, is what the operation promises."""
    blocks, everyone = np.arange(plan.blocks), np.arange(plan.ranks)
    right = np.zeros((plan.blocks, holds.shape[2]), np.int16)
    if plan.operation in ("all_reduce", "reduce_scatter"):
        right[:, : plan.ranks] = 1
    else:
        right[blocks, plan.owner] = 1
    if plan.operation == "reduce_scatter":
        where, what = plan.owner, blocks
    elif plan.operation == "all_to_all":
        where, what = plan.receiver, blocks
    else:
        where, what = np.repeat(everyone, plan.blocks), np.tile(blocks, plan.ranks)
    wrong = np.flatnonzero((holds[where, what] != right[what]).any(axis=1))
    if len(wrong):
        rank, block = int(where[wrong[0]]), int(what[wrong[0]])
        parts = _difference(holds[rank, block], right[block])
        more = f"; {len(wrong)} of {len(where)} blocks are wrong" if len(wrong) > 1 else ""
        raise PlanError(
            f"{plan.name} {plan.operation} of {plan.ranks} ranks: rank {rank} ends with block {block} {parts}{more}"
        )


def _difference(has: NDArray[np.int16], right: NDArray[np.int16]) -> str:
    def named(which: NDArray[np.bool_]) -> str:
        ranks = np.flatnonzero(which).tolist()
        return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")

    missing, extra = has[:-1] < right[:-1], has[:-1] > right[:-1]
    parts = ["never defined"] if has[-1] else []
    parts += [f"without the part of {named(missing)}"] if missing.any() else []
    parts += [f"with the part of {named(extra)} too often"] if extra.any() else []
    return " and ".join(parts)
