"""Execution of a collective on real values, of which some packets are lost.

A plan is executed step by step, in one order that its dependencies allow. All such orders leave the same data
(`foretrain.collective.verification` proves it of every plan), up to the order of sums. Losses are linear, so means
propagate exactly through any plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from foretrain.collective import build
from foretrain.collective.plan import Operation, Plan, rounds
from foretrain.collective.verification import initial
from foretrain.loss_tolerance.layout import TensorLayout
from foretrain.loss_tolerance.losses import LookaheadLosses, LossPattern, Tags, Way, check_chance
from foretrain.loss_tolerance.tagging import Tagger, Tagging

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


def plan_of(way: Way, operation: Operation, ranks: int) -> Plan:
    """Return the plan of an exchange; ConfigError where there is none for so many ranks."""
    if way == "transpose":
        return build("parameter_server", operation, ranks, servers=ranks, colocated=True)
    return build(way, operation, ranks)


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


@dataclass(slots=True)
class Tally:
    """Counters of what went over the network so far.

    Attributes:
        sent: bytes, padding included.
        lost: bytes of packets that never arrived.
        dropped_important: bytes of those that were not droppable.
    """

    sent: int = 0
    lost: int = 0
    dropped_important: int = 0

    @property
    def share(self) -> float:
        """Lost of sent."""
        return self.lost / self.sent if self.sent else 0.0


class Lossy:
    """Collective whose packets may be lost, run in each round of training.

    Attributes:
        plan, layout: what is moved, and how it is cut.
        tally: of all runs.
    """

    def __init__(self, plan: Plan, layout: TensorLayout, *, gap: Gap = "zero", tagging: Tagging | None = None) -> None:
        """``gap``: what stands where a value that should have been overwritten was lost; see `Gap`."""
        assert layout.blocks == plan.blocks
        self.plan, self.layout, self.tally = plan, layout, Tally()
        self._gap, self._script = gap, script(plan)
        self._tagger = Tagger(tagging or Tagging(), layout)
        self._reliable = layout.reliable

    @property
    def lossy(self) -> float:
        """Return the share of bytes that may be lost."""
        padded = self.layout.padded()
        return float(padded[~self._reliable].sum() / padded.sum())

    @property
    def droppable(self) -> float:
        """The share of these that switches may drop."""
        return self._tagger.droppable(self.layout)

    def run(self, holds: NDArray[np.float32], losses: LossPattern) -> None:
        """Moves everything in ``holds``, (ranks + helpers, blocks, width), in place.

        What a helper holds has to be zero where it is to be added to. A lost packet of a step that adds adds zero; of
        one that overwrites, see Note [Gaps]; what a rank holds then is what it passes on. Of tensors that are reliable
        nothing is lost, whatever ``losses`` say.
        """
        tags: Tags = {}
        if isinstance(losses, LookaheadLosses):
            tags = self.foreseen(holds)
            losses.foresee(tags)
        for step in self._script:
            cut = self.layout.cut(len(step.blocks))
            data = holds[step.source, step.blocks]
            packets = self._tagger.tag(step.round, cut, data)
            packets = tags.get((step.transfer, step.step), packets)
            lost = losses.lost(step.transfer, step.step, packets) & ~self._reliable[packets.message]
            self.tally.sent += int(packets.size.sum())
            if lost.any():
                self.tally.lost += int(packets.size[lost].sum())
                self.tally.dropped_important += int(packets.size[lost & ~packets.droppable].sum())
            self._write(holds, step, data, lost[cut.packet] if lost.any() else None)
        self._tagger.turn()

    def foreseen(self, holds: NDArray[np.float32]) -> Tags:
        """Return how the packets of a run of ``holds``, which it leaves as they are, would be tagged if none were
        lost.
        """
        holds, tags = holds.copy(), {}
        for step in self._script:
            data = holds[step.source, step.blocks]
            tags[step.transfer, step.step] = self._tagger.tag(
                step.round, self.layout.cut(len(step.blocks)), data, note=False
            )
            self._write(holds, step, data, None)
        return tags

    def _write(
        self, holds: NDArray[np.float32], step: PlanStep, data: NDArray[np.float32], gone: NDArray[np.bool_] | None
    ) -> None:
        if gone is not None:
            held = self._gap == "held" and not step.adds
            data[gone] = holds[step.target, step.blocks][gone] if held else 0.0
        if step.adds:
            holds[step.target, step.blocks] += data
        else:
            holds[step.target, step.blocks] = data


def reduced(plan: Plan, holds: NDArray[np.float32]) -> NDArray[np.float32]:
    """The sums that a reduce-scatter left at their owners, (blocks, width)."""
    return holds[plan.owner, np.arange(plan.blocks)]
