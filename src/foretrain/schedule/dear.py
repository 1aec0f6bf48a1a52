"""dear: reduce-scatter behind the backward pass, all-gather in front of the next forward pass.

Source: Zhang et al., "DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce Pipelining", ICDCS'23:
an all-reduce is split into its halves; groups of tensors (25 MB) are reduce-scattered as the backward pass completes
them; after the last, groups are all-gathered in forward order, and a layer's forward waits only for its own group.

Departure: all-gathers are queued together, not one by one as each group's forward begins; they leave in the same order
and never later. On a parameter server reduce-scatter is push and all-gather is pull.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from foretrain.schedule.buckets import Buckets, by_size, whole
from foretrain.schedule.job import Job
from foretrain.schedule.knob import Knob
from foretrain.tasks import Action, Done, Event, Ready, Start, StepBegin
from foretrain.units import Time


class Dear:
    """Decoupled all-reduce."""

    knobs: ClassVar[tuple[Knob, ...]] = (Knob("group", 25_000_000, 1 << 10, 1 << 34),)
    barrier: bool = False
    warmup: int = 0

    def __init__(self, job: Job, *, group: int) -> None:
        groups = by_size(job.by_release, job.tasks, [group])
        self._reduce = Buckets(job.tasks, groups, "reduce_scatter")
        urgency = [min(job.tasks[i].first_use for i in tasks) for tasks in groups]
        order = sorted(range(len(groups)), key=urgency.__getitem__)
        self._gather = [Start(whole("all_gather", job.tasks, groups[k])) for k in order]
        self._reducing = 0

    def handle(self, event: Event, now: Time) -> Sequence[Action]:
        """Reduce-scatters groups as they complete; all-gathers when the last reduce-scatter is done."""
        if type(event) is StepBegin:
            self._reduce.reset()
            self._reducing = len(self._gather)
        elif type(event) is Ready:
            return self._reduce.ready(event.task)
        elif type(event) is Done and event.chunk.op == "reduce_scatter":
            self._reducing -= 1
            if not self._reducing:
                return self._gather
        return ()
