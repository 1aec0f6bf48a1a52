"""fusion: Horovod's tensor fusion.

Source: Sergeev & Del Balso, arXiv:1802.05799 §4, and Horovod's controller: a background cycle wakes every
``cycle``; what has become ready since is fused greedily, in the order of readiness, up to ``threshold`` bytes per
operation. The optimizer waits for all.

Departure: cycles tick from the start of the backward pass; Horovod's run freely, which shifts each by less than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from foretrain.schedule.buckets import whole
from foretrain.schedule.job import Job
from foretrain.schedule.knob import Knob
from foretrain.tasks import Action, Event, Ready, Start, StepBegin, Wake, WakeAt
from foretrain.units import MICROSECOND, MILLISECOND, SECOND, Time


class Fusion:
    """Horovod's cycle and fusion buffer."""

    knobs: ClassVar[tuple[Knob, ...]] = (
        Knob("threshold", 128 << 20, 1 << 10, 1 << 34),
        Knob("cycle", MILLISECOND, 10 * MICROSECOND, SECOND, "time"),
    )
    barrier: bool = True
    warmup: int = 0

    def __init__(self, job: Job, *, threshold: int, cycle: Time) -> None:
        self._tasks = job.tasks
        self._threshold = threshold
        self._cycle = cycle
        self._began: Time = 0
        self._queue: list[int] = []

    def handle(self, event: Event, now: Time) -> Sequence[Action]:
        """Queue what is ready; fuse it at the end of the cycle."""
        if type(event) is StepBegin:
            self._began = now
        elif type(event) is Ready:
            self._queue.append(event.task)
            if len(self._queue) == 1:
                cycles = -(-(now - self._began) // self._cycle)
                return (WakeAt(self._began + cycles * self._cycle),)
        elif type(event) is Wake:
            return self._flush()
        return ()

    def _flush(self) -> list[Action]:
        actions: list[Action] = []
        bucket: list[int] = []
        size = 0
        for index in self._queue:
            if bucket and size + self._tasks[index].size > self._threshold:
                actions.append(Start(whole("all_reduce", self._tasks, bucket)))
                bucket, size = [], 0
            bucket.append(index)
            size += self._tasks[index].size
        self._queue.clear()
        return [*actions, Start(whole("all_reduce", self._tasks, bucket))]
