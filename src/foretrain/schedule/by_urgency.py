"""Policies that send the most urgent slice first: p3, bytescheduler, largest_tail_first.

They differ in what is urgent, in how large slices are, and in how many may be under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from foretrain.schedule.job import Job, Knob
from foretrain.schedule.window import Window
from foretrain.tasks import Action, Event, Priorities
from foretrain.units import Time


class _BySlices:
    """Policy that a `Window` of slices carries out; ``order`` is of tasks, the most urgent first."""

    barrier: bool = False
    warmup: int = 0
    priorities: Priorities

    def __init__(self, job: Job, order: Sequence[int], partition: int, credit: int, grain: int = 0) -> None:
        self._window = Window(job.tasks, [[i] for i in order], partition, credit, grain)
        self.priorities = {"all_reduce": order}

    def handle(self, event: Event, now: Time) -> Sequence[Action]:
        """Return credit, queue what is ready, and start what the credit allows."""
        return self._window.handle(event)


class P3(_BySlices):
    """Priority-based parameter propagation.

    Source: Jayarajan et al., "Priority-based Parameter Propagation", MLSys'19 §4: slices of 50,000 parameters in the
    paper and 40,000 in its code (taken here); the most urgent slice first; the server answers a push with the updated
    value, so that push and pull are one operation; the next slice is sent when the answer has come (stop-and-wait).
    Real servers answer when all workers have pushed, which one that is ahead need not wait for: there the next slice is
    sent when the server has acknowledged this one.
    """

    knobs: ClassVar[tuple[Knob, ...]] = (Knob("slice", 160_000, 1 << 10, 1 << 34),)

    def __init__(self, job: Job, *, slice: int) -> None:  # noqa: A002, the paper's word
        # One byte of credit, which one slice overdraws: exactly one is under way.
        super().__init__(job, job.by_urgency, slice, credit=1)


class ByteScheduler(_BySlices):
    """Priority under a credit window.

    Source: Peng et al., SOSP'19 §3–5: tensors are cut into partitions that inherit their priority, the order of first
    use in the forward pass; the most urgent is sent while credit lasts; a step does not wait for the last gradient,
    each layer's forward waits for its own (crossing the global barrier).

    Departures: priorities come from *observed* first use (`Task.first_use`), not from registration order, since the two
    differ (the published plug-in numbers parameters as registered). Push and pull are one operation, as in the paper.
    Defaults are the paper's 1 M and 4 M parameters; its all-reduce advice is 8 M and 16 M.

    ``fuse`` (0 by default, which is the paper) sends small tensors together, until a chunk takes ``fuse`` times as long
    as its operation costs by itself: of ResNet-50's 161 tensors 108 are smaller than one operation of gloo is worth.
    """

    knobs: ClassVar[tuple[Knob, ...]] = (
        Knob("partition", 4_000_000, 1 << 10, 1 << 34),
        Knob("credit", 16_000_000, 1 << 10, 1 << 34),
        Knob("fuse", 0.0, 0.0, 1e6, "factor", grid=(0.0, 1.0, 4.0, 16.0)),
    )

    def __init__(self, job: Job, *, partition: int, credit: int, fuse: float) -> None:
        super().__init__(job, job.by_urgency, partition, credit, int(fuse * job.cost.breakeven))


class LargestTailFirst(_BySlices):
    """Jackson's preemptive rule on partitions.

    Source: exchanging gradients is 1 | pmtn, r_i | max(C_i + q_i), which Jackson's preemptive rule solves: always send
    what has the largest tail q_i, the time that must still pass after it lands. As ``partition`` → 0 its iteration time
    tends to T* (`foretrain.schedule.bounds`); with costs per operation it is no longer optimal, which is what makes the
    other policies interesting. It is an ideal to compare with, not a recommendation.

    With tails that fall in first-use order this is ByteScheduler's priority; they differ when updates take long or a
    tied weight's first use is not where its gradient appears.
    """

    knobs: ClassVar[tuple[Knob, ...]] = (
        Knob("partition", 256_000, 1, 1 << 34),
        Knob("credit", 512_000, 1, 1 << 34),
    )

    def __init__(self, job: Job, *, partition: int, credit: int) -> None:
        order = sorted(range(len(job.tasks)), key=lambda i: (-job.tails[i], job.tasks[i].first_use))
        super().__init__(job, order, partition, credit)
