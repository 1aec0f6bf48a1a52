"""p3: small slices, strict priority, one at a time.

Source: Jayarajan et al., "Priority-based Parameter Propagation", MLSys'19 §4: slices of 50,000 parameters in the paper
and 40,000 in its code (taken here); the most urgent slice first; the server answers a push with the updated value, so
that push and pull are one operation; the next slice is sent when the answer has come (stop-and-wait).
Real servers answer when all workers have pushed, which one that is ahead need not wait for: there the next slice is
sent when the server has acknowledged this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from foretrain.schedule.job import Job
from foretrain.schedule.knob import Knob
from foretrain.schedule.window import Window
from foretrain.tasks import Action, Event
from foretrain.units import Time


class P3:
    """Priority-based parameter propagation."""

    knobs: ClassVar[tuple[Knob, ...]] = (Knob("slice", 160_000, 1 << 10, 1 << 34),)
    barrier: bool = False
    warmup: int = 0

    def __init__(self, job: Job, *, slice: int) -> None:  # noqa: A002, the paper's word
        # One byte of credit, which one slice overdraws: exactly one is under way.
        self._window = Window(job.tasks, [[i] for i in job.by_urgency], slice, credit=1)

    def handle(self, event: Event, now: Time) -> Sequence[Action]:
        """Send the most urgent slice when the last has been answered."""
        return self._window.handle(event)
