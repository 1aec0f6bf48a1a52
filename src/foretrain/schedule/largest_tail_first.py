"""largest_tail_first: the preemptive optimum, as near as partitions allow.

Source: exchanging gradients is 1 | pmtn, r_i | max(C_i + q_i), which Jackson's preemptive rule solves: always send what
has the largest tail q_i, the time that must still pass after it lands. As ``partition`` → 0 its iteration time tends to
T* (`foretrain.schedule.bounds`); with costs per operation it is no longer optimal, which is what makes the other
policies interesting. It is an ideal to compare with, not a recommendation.

With tails that fall in first-use order this is ByteScheduler's priority; they differ when updates take long or a tied
weight's first use is not where its gradient appears.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from foretrain.schedule.job import Job
from foretrain.schedule.knob import Knob
from foretrain.schedule.window import Window
from foretrain.tasks import Action, Event
from foretrain.units import Time


class LargestTailFirst:
    """Jackson's preemptive rule on partitions."""

    knobs: ClassVar[tuple[Knob, ...]] = (
        Knob("partition", 256_000, 1, 1 << 34),
        Knob("credit", 512_000, 1, 1 << 34),
    )
    barrier: bool = False
    warmup: int = 0

    def __init__(self, job: Job, *, partition: int, credit: int) -> None:
        order = sorted(range(len(job.tasks)), key=lambda i: (-job.tails[i], job.tasks[i].first_use))
        self._window = Window(job.tasks, [[i] for i in order], partition, credit)

    def handle(self, event: Event, now: Time) -> Sequence[Action]:
        """Start the piece with the largest tail."""
        return self._window.handle(event)
