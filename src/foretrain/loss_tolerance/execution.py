"""Execution of a collective on real values, of which some packets are lost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretrain.collective.plan import Plan
from foretrain.loss_tolerance.layout import TensorLayout
from foretrain.loss_tolerance.losses import LookaheadLosses, LossPattern, Tags
from foretrain.loss_tolerance.plan_steps import Gap, PlanStep, script
from foretrain.loss_tolerance.tagging import Tagger, Tagging


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

    @property
    def droppable(self) -> float:
        """The share of bytes that may be dropped."""
        return self._tagger.droppable(self.layout)

    def run(self, holds: NDArray[np.float32], losses: LossPattern) -> None:
        """Moves everything in ``holds``, (ranks + helpers, blocks, width), in place.

        What a helper holds has to be zero where it is to be added to. A lost packet of a step that adds adds zero; of
        one that overwrites, see Note [Gaps]; what a rank holds then is what it passes on.
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
            lost = losses.lost(step.transfer, step.step, packets)
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
