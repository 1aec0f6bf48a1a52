"""Steps of a collective plan in one order that its dependencies allow, and what survives losses in expectation.

All such orders leave the same data (`foretrain.collective.verification` proves it of every plan), up to the order of
sums. Losses are linear, so means propagate exactly through any plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from foretrain.collective.plan import Plan, rounds
from foretrain.collective.verification import initial
from foretrain.loss_tolerance.survival import check_chance

Gap: TypeAlias = Literal["zero", "held"]
"""Replacement for a lost value that was to overwrite. See Note [Gaps]."""

# Note [Gaps]
# A step that adds and loses a packet adds zero there: the gradient is taken as 0 and nothing is rescaled (DLCP). For
# one that overwrites there are two answers. *zero* is DLCP's for gradients: whoever waits for a sum and does not get
# it takes 0, never that of the round before, which would be applied twice. *held* is DLCP's for parameters that are
# pulled: the previous value stays, and the next pull brings what was missed. With gradients *held* leaves a rank the
# partial sum of its own and of those before it, which is in its buffer anyway.


@dataclass(frozen=True, slots=True)
class PlanStep:
    """Step of a transfer.

    Attributes:
        transfer, step: which.
        round: in which round of a world where every step takes 1; steps of one round are under way together.
        source, target: endpoints.
        adds: whether the target adds, else it overwrites.
        blocks: int64 (count,), what is moved, in this order.
    """

    transfer: int
    step: int
    round: int
    source: int
    target: int
    adds: bool
    blocks: NDArray[np.int64]


def script(plan: Plan) -> tuple[PlanStep, ...]:
    """Return the steps of ``plan`` by round, then by transfer. StallError if transfers wait for each other."""
    ended, made = np.zeros(plan.transfers, np.int64), []
    for number, ready in enumerate(rounds(plan)):
        for one in ready.tolist():
            step = int(ended[one])
            ends = int(plan.source[one]), int(plan.target[one])
            made.append(PlanStep(one, step, number, *ends, step < int(plan.adds[one]), plan.moved(one, step)))
        ended[ready] += 1
    return tuple(made)


def expected(plan: Plan, p: float, *, gap: Gap = "zero") -> NDArray[np.float64]:
    """Return how much of each contributor each endpoint holds of each block in the end, on average over losses.

    Each packet of each step is lost with probability ``p`` by itself. Whether a step's packets are lost together does
    not matter to the mean.

    Args:
        plan: any.
        p: of a hop.
        gap: what stands where a value that should have been overwritten was lost.

    Returns:
        (endpoints, blocks, contributors), as `foretrain.collective.verification.initial` counts them without its last
        column.
    """
    check_chance("p", p)
    holds = initial(plan)[:, :, :-1].astype(np.float64)
    for step in script(plan):
        data = (1 - p) * holds[step.source, step.blocks]
        if step.adds:
            holds[step.target, step.blocks] += data
        else:
            kept = p * holds[step.target, step.blocks] if gap == "held" else 0.0
            holds[step.target, step.blocks] = data + kept
    return holds


def surviving(plan: Plan, p: float, *, gap: Gap = "zero") -> float:
    """Return the mean over ranks, blocks and contributors of what the plan's operation should have brought as 1.

    For a reduce-scatter each block counts at its owner, for an all-gather and an all-reduce at every rank.
    """
    holds, blocks = expected(plan, p, gap=gap), np.arange(plan.blocks)
    if plan.operation == "reduce_scatter":
        return float(holds[plan.owner, blocks, : plan.ranks].mean())
    if plan.operation == "all_reduce":
        return float(holds[: plan.ranks, :, : plan.ranks].mean())
    return float(holds[: plan.ranks][:, blocks, plan.owner].mean())
