"""Simulate one workload on one cluster under one schedule; the result is a `Run`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrain.engine import Decision
from foretrain.errors import ConfigError
from foretrain.files import write_json
from foretrain.network import Cluster, cluster
from foretrain.network.shards import part_limit
from foretrain.schedule import Bound, Job, Spec, spec
from foretrain.schedule import bound as bound_of
from foretrain.schedule.script import Written, of_step, write
from foretrain.simulation.host_cores import ends
from foretrain.simulation.links import Label, Pipes
from foretrain.simulation.parameter_server import ParameterServerCarrier
from foretrain.simulation.replay import TrainingLoop
from foretrain.simulation.world import ChunkCarrier, VirtualWorld
from foretrain.tasks import Chunk
from foretrain.trace import Timeline
from foretrain.units import Time, to_seconds
from foretrain.workload.step import Workload

if TYPE_CHECKING:
    from foretrain.network import Place


@dataclass(frozen=True, slots=True)
class Run:
    """Run of a workload on a cluster under a schedule, in steady state.

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
        """Return samples per second of the whole cluster."""
        return self.workload.batch * self.cluster.total_gpus / to_seconds(self.iteration_time)

    def last_steps(self, count: int = 2) -> Timeline:
        """The last ``count`` iterations of the timeline, from 0."""
        first = max(0, len(self.begins) - 1 - count)
        return self.timeline.between(self.begins[first], self.begins[-1])

    def script(self) -> str:
        """Return the chunks that the last whole step sent, as text; `foretrain.schedule.script` runs it again."""
        chunks = of_step(self.log, len(self.begins) - 2)
        return write(chunks, Job.of(self.workload, self.cluster.cost).tasks)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, times in seconds, for JSON."""
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
        """Write `to_dict` as JSON, whole or not at all."""
        write_json(path, self.to_dict())


def job_on(workload: Workload, where: Place) -> Job:
    """Return the scheduler's view of ``workload`` on ``where``."""
    if not isinstance(workload, Workload):
        raise ConfigError("workload", workload, "is no workload", "write e.g. ft.workload.zoo('vgg16')")
    exchange = where.exchange if isinstance(where, Cluster) else "all_reduce"
    return Job.of(workload, where.cost, separate=exchange != "all_reduce", beside=exchange == "ps_colocated")


def bound(workload: Workload, where: str | Place) -> Bound:
    """Return T* of ``workload`` on ``where``: see `foretrain.schedule.bounds`."""
    place = cluster(where)
    work = workload.slowed(place.slowdown)
    return bound_of(work, job_on(work, place))


def simulate(
    workload: Workload,
    where: str | Place,
    schedule: str | Spec | Written = "bytescheduler",
    *,
    steps: int = 2,
    trace: bool = True,
) -> Run:
    """Simulate ``workload`` on ``where`` under ``schedule`` and measure the steady state.

    Args:
        workload: one worker's step.
        where: a cluster, a deployment on a topology, or the notation of either: ``"4x8xV100@100Gbps"``,
            ``"bigraph:8x4@100Gbps"``.
        schedule: a policy or its notation, e.g. ``"bytescheduler(partition=1MB)"``, or one that was written down.
        steps: iterations after the policy's own warm-up; the last is the one that is measured.
        trace: whether to record a timeline.

    Raises:
        ConfigError: an argument is wrong.
        ScheduleError: a written schedule does not read, or does not exchange everything once.
        StallError: the schedule leaves bytes unsent.
    """
    if not isinstance(steps, int) or steps < 1:
        raise ConfigError("steps", steps, "is not a number of steps to measure", "simulate at least 1")
    place, plan = cluster(where), schedule if isinstance(schedule, Written) else spec(schedule)
    workload = workload.slowed(place.slowdown)
    work = job_on(workload, place)
    policy = plan.build(work)
    timeline = Timeline() if trace else None
    carrier = carrier_on(
        *(place, work, lambda task: replay.landed(task), timeline, lambda chunk: label_of(chunk, work, replay)),
        knobs=plan.settings if isinstance(plan, Spec) else {},
    )
    world, served = VirtualWorld(carrier), isinstance(carrier, ParameterServerCarrier)
    replay = TrainingLoop(workload, work, policy, world, policy.warmup + steps, timeline, served=served)
    replay.begin()
    world.run()
    replay.raise_if_stalled()
    begins = tuple(replay.begins)
    return Run(
        workload=workload,
        cluster=place,
        schedule=plan,
        barrier=policy.barrier,
        iteration_time=begins[-1] - begins[-2],
        bound=bound_of(workload, work),
        begins=begins,
        log=replay.log,
        timeline=timeline or Timeline(),
    )


def label_of(chunk: Chunk, work: Job, replay: TrainingLoop) -> tuple[str, int]:
    """Return a chunk's name and step for the timeline."""
    first = work.tasks[chunk.pieces[0].task].name
    more = len(chunk.pieces) - 1
    return f"{first} +{more}" if more else first, len(replay.begins) - 1


def carrier_on(
    place: Place,
    work: Job,
    landed: Callable[[int], None],
    timeline: Timeline | None = None,
    label: Label = lambda _: ("", 0),
    *,
    knobs: Mapping[str, float] | None = None,
) -> ChunkCarrier:
    """Return the carrier of chunks on ``place``; over a parameter server it says itself what has ``landed``.

    Servers place tensors by the policy's ``knobs``.
    """
    if not isinstance(place, Cluster):
        from foretrain.simulation.links import Operations

        return Operations(place, timeline, label)
    routes = place.routes()
    if place.exchange == "all_reduce":
        return Pipes(routes, timeline, label)
    shards = place.shards
    message = place.message if shards is None else part_limit(knobs or {}, shards.number, place.message)
    costs = {"message": message, "ends": ends(place), "shards": shards}
    return ParameterServerCarrier(routes, work.tasks, landed, timeline, label, **costs)
