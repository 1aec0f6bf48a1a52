"""fifo: every gradient in full as soon as it exists; the step ends when all have landed.

Source: wait-free backpropagation, Poseidon (ATC'17) §3, the default of MXNet's and Horovod's all-reduce without fusion.
T = max over m of (r_m + S_m) + Σu + Σf: see `foretrain.schedule.bounds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from foretrain.schedule.buckets import whole
from foretrain.schedule.job import Job
from foretrain.schedule.knob import Knob
from foretrain.tasks import Action, Event, Ready, Start
from foretrain.units import Time


class Fifo:
    """Wait-free backpropagation (WFBP)."""

    knobs: ClassVar[tuple[Knob, ...]] = ()
    barrier: bool = True
    warmup: int = 0

    def __init__(self, job: Job) -> None:
        self._chunks = [whole("all_reduce", job.tasks, [task.index]) for task in job.tasks]

    def handle(self, event: Event, now: Time) -> Sequence[Action]:
        """Start what is ready."""
        return (Start(self._chunks[event.task]),) if type(event) is Ready else ()
