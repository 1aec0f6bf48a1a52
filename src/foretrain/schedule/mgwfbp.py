"""mgwfbp: merged-gradient wait-free backpropagation.

Source: Shi, Chu & Li, "MG-WFBP", INFOCOM'19 algorithm 1: an all-reduce of s bytes takes t(s) = α + βs; going through
the gradients in the order of release, one is merged into the next when that costs nothing or saves a start-up:

    R = ready(next):  merge  iff  R < start + t(size)  and  (start > R  or  R − start < α)

where ``start`` is when the link is free and the gradient ready. The optimizer waits for all.

α is the part of an operation that occupies the link (θ): latency is overlapped by what follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from foretrain.schedule.buckets import Buckets
from foretrain.schedule.job import CostModel, Job
from foretrain.schedule.knob import Knob
from foretrain.tasks import Action, Event, Ready, StepBegin
from foretrain.units import Time


def merge(releases: Sequence[Time], sizes: Sequence[int], cost: CostModel) -> list[range]:
    """Return the groups of consecutive gradients to merge; both sequences in the order of release. O(n)."""
    groups: list[range] = []
    free: Time = 0
    first = size = 0
    for index, (release, own) in enumerate(zip(releases, sizes, strict=True)):
        size += own
        start = max(free, release)
        following = releases[index + 1] if index + 1 < len(releases) else None
        end = start + cost.time(size)
        if following is not None and following < end and (start > following or following - start < cost.startup):
            continue
        groups.append(range(first, index + 1))
        free, first, size = end, index + 1, 0
    return groups


class MgWfbp:
    """Merged-gradient WFBP."""

    knobs: ClassVar[tuple[Knob, ...]] = ()
    barrier: bool = True
    warmup: int = 0

    def __init__(self, job: Job) -> None:
        order = job.by_release
        groups = merge([job.releases[i] for i in order], [job.tasks[i].size for i in order], job.cost)
        self._buckets = Buckets(job.tasks, [[order[k] for k in group] for group in groups])

    def handle(self, event: Event, now: Time) -> Sequence[Action]:
        """Starts merged gradients in order."""
        if type(event) is StepBegin:
            self._buckets.reset()
        return self._buckets.ready(event.task) if type(event) is Ready else ()
