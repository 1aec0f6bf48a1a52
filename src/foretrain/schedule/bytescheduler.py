"""bytescheduler: partition, priority, credit, across the barrier.

Source: Peng et al., SOSP'19 §3–5: tensors are cut into partitions that inherit their priority, the order of first
use in the forward pass; the most urgent is sent while credit lasts; a step does not wait for the last gradient, each
layer's forward waits for its own (crossing the global barrier).

Departures: priorities come from *observed* first use (`Task.first_use`), not from registration order, since the two
differ (the published plug-in numbers parameters as registered). Push and pull are one operation, as in the paper.
Defaults are the paper's 1 M and 4 M parameters; its all-reduce advice is 8 M and 16 M.

``fuse`` (0 by default, which is the paper) sends small tensors together, until a chunk takes ``fuse`` times as long as
its operation costs by itself: of ResNet-50's 161 tensors 108 are smaller than one operation of gloo is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from foretrain.schedule.job import Job
from foretrain.schedule.knob import Knob
from foretrain.schedule.window import Window
from foretrain.tasks import Action, Event
from foretrain.units import Time


class ByteScheduler:
    """Priority under a credit window."""

    knobs: ClassVar[tuple[Knob, ...]] = (
        Knob("partition", 4_000_000, 1 << 10, 1 << 34),
        Knob("credit", 16_000_000, 1 << 10, 1 << 34),
        Knob("fuse", 0.0, 0.0, 1e6, "factor", grid=(0.0, 1.0, 4.0, 16.0)),
    )
    barrier: bool = False
    warmup: int = 0

    def __init__(self, job: Job, *, partition: int, credit: int, fuse: float) -> None:
        self._window = Window(
            job.tasks, [[i] for i in job.by_urgency], partition, credit, int(fuse * job.cost.breakeven)
        )

    def handle(self, event: Event, now: Time) -> Sequence[Action]:
        """Returns credit, queues what is ready, and starts what the credit allows."""
        return self._window.handle(event)
