"""A run: what a simulation, and one day a measurement, says about one schedule."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from foretrain.engine import Decision
from foretrain.files import write_atomically
from foretrain.schedule import Bound, Job, Spec
from foretrain.schedule.script import Written, of_step, write
from foretrain.trace import Timeline
from foretrain.units import Time, to_seconds
from foretrain.workload.step import Workload

if TYPE_CHECKING:
    from foretrain.network import Place


@dataclass(frozen=True, slots=True)
class Run:
    """One workload on one cluster under one schedule, in steady state.

    Attributes:
        workload: what ran.
        cluster: where.
        schedule: under which policy and knobs, or which written schedule.
        barrier: whether all waited for the last gradient.
        iteration_time: ps from one backward pass to the next.
        bound: the optimum it is measured against.
        begins: when each backward pass began, ps.
        log: every decision.
        timeline: spans of the whole run; empty unless asked for.
    """

    workload: Workload
    cluster: Place
    schedule: Spec | Written
    barrier: bool
    iteration_time: Time
    bound: Bound
    begins: tuple[Time, ...]
    log: tuple[Decision, ...]
    timeline: Timeline

    @property
    def gap(self) -> float:
        """T/T* − 1: the distance to the optimum, 0.05 for 5 %."""
        return self.iteration_time / self.bound.time - 1

    @property
    def exposed(self) -> Time:
        """T − Σb − Σf: communication and updates that nothing hides."""
        return self.iteration_time - self.workload.compute

    @property
    def idle(self) -> float:
        """Share of the iteration in which the GPU does nothing; with a barrier the update is work of the GPU."""
        busy = self.workload.update if self.barrier else 0
        return (self.exposed - busy) / self.iteration_time

    @property
    def throughput(self) -> float:
        """Samples per second of the whole cluster."""
        return self.workload.batch * self.cluster.total_gpus / to_seconds(self.iteration_time)

    def last_steps(self, count: int = 2) -> Timeline:
        """The last ``count`` iterations of the timeline, from 0."""
        first = max(0, len(self.begins) - 1 - count)
        return self.timeline.between(self.begins[first], self.begins[-1])

    def script(self) -> str:
        """What the last whole step sent, chunk by chunk, as text; `foretrain.schedule.script` runs it again."""
        chunks = of_step(self.log, len(self.begins) - 2)
        return write(chunks, Job.of(self.workload, self.cluster.cost).tasks)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, times in seconds, for JSON."""
        return {
            "workload": self.workload.name,
            "cluster": str(self.cluster),
            "schedule": str(self.schedule),
            "iteration_time": to_seconds(self.iteration_time),
            "samples_per_second": self.throughput,
            "optimum": to_seconds(self.bound.time),
            "gap": self.gap,
            "exposed": to_seconds(self.exposed),
            "idle": self.idle,
            "operations_per_step": len(self.log) / (len(self.begins) - 1),
        }

    def save(self, path: str | Path) -> None:
        """Writes `to_dict` as JSON, whole or not at all."""
        write_atomically(path, msgspec.json.format(msgspec.json.encode(self.to_dict()), indent=2))
