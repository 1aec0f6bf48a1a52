"""A plan written out step by step, in one order that its dependencies allow.

All such orders leave the same data (`foretrain.collective.hazards` proves it of every plan), up to the order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from foretrain.collective.plan import Plan
from foretrain.collective.progress import rounds

Gap: TypeAlias = Literal["zero", "held"]
"""What stands where a value that was to overwrite is lost. See Note [Gaps]."""

# Note [Gaps]
# A step that adds and loses a packet adds zero there: the gradient is taken as 0 and nothing is rescaled (DLCP). For
# one that overwrites there are two answers. *zero* is DLCP's for gradients: whoever waits for a sum and does not get
# it takes 0, never that of the round before, which would be applied twice. *held* is DLCP's for parameters that are
# pulled: the previous value stays, and the next pull brings what was missed. With gradients *held* leaves a rank the
# partial sum of its own and of those before it, which is in its buffer anyway.


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One step of one transfer.

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
    """All steps of ``plan``, round by round and within one by transfer. StallError if transfers wait for each other."""
    ended, made = np.zeros(plan.transfers, np.int64), []
    for number, ready in enumerate(rounds(plan)):
        for one in ready.tolist():
            step = int(ended[one])
            ends = int(plan.source[one]), int(plan.target[one])
            made.append(PlanStep(one, step, number, *ends, step < int(plan.adds[one]), plan.moved(one, step)))
        ended[ready] += 1
    return tuple(made)
