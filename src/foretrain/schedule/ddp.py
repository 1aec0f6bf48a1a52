"""ddp: the buckets of PyTorch's DistributedDataParallel.

Source: Li et al., VLDB'20 §3.2, and torch 2.13's `torch/nn/parallel/distributed.py` and `reducer.cpp`:

- In the first step there is a single bucket with everything (torch 2.13 without ``find_unused_parameters``), so that
  the first step overlaps nothing and predicts nothing.
- It then rebuilds the buckets once, in the order in which gradients became ready, with a first bucket of 1 MiB.
- With ``find_unused_parameters`` it never rebuilds: buckets are cut in registration order, the first of 1 MiB, and
  used in reverse, from the first step on.
- With ``bucket_cap_mb_list``, here ``buckets``, bucket k has cap k and the last cap serves all that follow, from the
  first step on.
- Buckets start strictly in index order, each when all its gradients are ready. The optimizer waits for all of them.

Departure: with an explicit ``bucket_cap_mb`` torch also uses it for the first bucket. Here the first bucket stays at
``first``, so that the baseline "DDP at its best bucket" is as strong as DDP can be made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from foretrain.schedule.buckets import Buckets, by_size
from foretrain.schedule.job import Job
from foretrain.schedule.knob import Knob
from foretrain.tasks import Action, Event, Ready, StepBegin
from foretrain.units import Time


class Ddp:
    """DistributedDataParallel's buckets."""

    knobs: ClassVar[tuple[Knob, ...]] = (
        Knob("bucket", 25 << 20, 1 << 10, 1 << 34),
        Knob("buckets", (), 1, 1 << 34, "sizes", tunable=False),
        Knob("first", 1 << 20, 1 << 10, 1 << 34, tunable=False),
        Knob("find_unused", 0, 0, 1, "count", tunable=False),
    )
    barrier: bool = True
    warmup: int = 1

    def __init__(self, job: Job, *, bucket: int, buckets: tuple[int, ...], first: int, find_unused: int) -> None:
        self._tasks = job.tasks
        self._caps = buckets or (min(first, bucket), bucket)
        registered = range(len(job.tasks))
        initial = by_size(registered, job.tasks, self._caps)[::-1] if find_unused or buckets else [registered]
        self._buckets = Buckets(job.tasks, initial)
        self._seen: list[int] = []
        self._rebuilt = bool(find_unused)

    def handle(self, event: Event, now: Time) -> Sequence[Action]:
        """Start the buckets whose turn has come; rebuild them after the first step."""
        if type(event) is StepBegin:
            if self._seen and not self._rebuilt:
                self._buckets = Buckets(self._tasks, by_size(self._seen, self._tasks, self._caps))
                self._rebuilt = True
            self._buckets.reset()
        elif type(event) is Ready:
            if not self._rebuilt:
                self._seen.append(event.task)
            return self._buckets.ready(event.task)
        return ()
