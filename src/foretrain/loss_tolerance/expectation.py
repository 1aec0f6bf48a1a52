"""What survives of every contribution in expectation, exactly, for any plan: losses are linear, so means propagate."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foretrain.collective.plan import Plan
from foretrain.collective.verification import initial
from foretrain.loss_tolerance.plan_steps import Gap, script
from foretrain.loss_tolerance.survival import check_chance


def expected(plan: Plan, p: float, *, gap: Gap = "zero") -> NDArray[np.float64]:
    """How much of each contributor each endpoint holds of each block in the end, on average over all losses.

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
    """The mean over ranks, blocks and contributors of what the plan's operation should have brought as 1.

    For a reduce-scatter each block counts at its owner, for an all-gather and an all-reduce at every rank.
    """
    holds, blocks = expected(plan, p, gap=gap), np.arange(plan.blocks)
    if plan.operation == "reduce_scatter":
        return float(holds[plan.owner, blocks, : plan.ranks].mean())
    if plan.operation == "all_reduce":
        return float(holds[: plan.ranks, :, : plan.ranks].mean())
    return float(holds[: plan.ranks][:, blocks, plan.owner].mean())
