"""simulate: one workload, one cluster, one schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from foretrain.errors import ConfigError
from foretrain.network import Cluster, cluster
from foretrain.schedule import Bound, Job, Spec, spec
from foretrain.schedule import bound as bound_of
from foretrain.schedule.script import Written
from foretrain.simulation.parameter_server import ParameterServerCarrier
from foretrain.simulation.pipes import Label, Pipes
from foretrain.simulation.replay import TrainingLoop
from foretrain.simulation.run import Run
from foretrain.simulation.world import ChunkCarrier, VirtualWorld
from foretrain.tasks import Chunk
from foretrain.trace import Timeline
from foretrain.workload.step import Workload

if TYPE_CHECKING:
    from foretrain.network import Place


def job_on(workload: Workload, where: Place) -> Job:
    """The scheduler's view of ``workload`` on ``where``."""
    if not isinstance(workload, Workload):
        raise ConfigError("workload", workload, "is no workload", "write e.g. ft.workload.zoo('vgg16')")
    return Job.of(workload, where.cost)


def bound(workload: Workload, where: str | Place) -> Bound:
    """T* of ``workload`` on ``where``: see `foretrain.schedule.bounds`."""
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
    """Runs ``workload`` on ``where`` under ``schedule`` and measures its steady state.

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
        place, work, lambda task: replay.landed(task), timeline, lambda chunk: label_of(chunk, work, replay)
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
    """A chunk's name and step, for the timeline."""
    first = work.tasks[chunk.pieces[0].task].name
    more = len(chunk.pieces) - 1
    return f"{first} +{more}" if more else first, len(replay.begins) - 1


def carrier_on(
    place: Place,
    work: Job,
    landed: Callable[[int], None],
    timeline: Timeline | None = None,
    label: Label = lambda _: ("", 0),
) -> ChunkCarrier:
    """What moves chunks on ``place``; over a parameter server it says itself what has ``landed``."""
    if not isinstance(place, Cluster):
        from foretrain.simulation.operations import Operations

        return Operations(place, timeline, label)
    routes = place.routes()
    if place.exchange == "all_reduce":
        return Pipes(routes, timeline, label)
    return ParameterServerCarrier(routes, work.tasks, landed, timeline, label, message=place.message)
