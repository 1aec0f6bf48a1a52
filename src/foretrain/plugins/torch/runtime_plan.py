"""What the watched steps amount to: one workload, one network and one schedule, the same on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import nn

from foretrain.comm.coordinator.protocol import pack_spec, unpack_spec
from foretrain.comm.observation import StepProfile, workload_of
from foretrain.comm.options import AttachOptions
from foretrain.network import Cluster
from foretrain.planner import Auto, SavedPlan, ScheduleRequest, choose, tune
from foretrain.planner.backends import cluster_of
from foretrain.planner.knob_space import Space
from foretrain.planner.online import Tuner
from foretrain.planner.plan import fingerprint
from foretrain.planner.simulator_prior import JobForecaster
from foretrain.planner.tuned_knobs import Saved, folder
from foretrain.plugins.torch.control_group import ControlGroup
from foretrain.plugins.torch.gradient_buffer import GradientBuffer, wire_dtype
from foretrain.schedule import POLICIES, Bound, CostModel, Job, Spec, bound
from foretrain.simulation import simulate
from foretrain.tasks import Chunk
from foretrain.workload.step import Workload

logger = logging.getLogger("foretrain.auto")
"""Of what the planner has to say."""


_GPU_MEMORY = 500e9
"""Bytes/s that a GPU streams through its memory, for what compression would cost: most have more."""


class RuntimePlan(NamedTuple):
    """How the steps to come are scheduled.

    Attributes:
        seen: the observation of the slowest rank.
        gradients: flat buffers for them, in the order of use.
        workload: the same as a workload.
        cost: of the network, measured.
        cluster: the same as the simulator takes it; None for a single rank.
        job: the scheduler's view of both.
        schedule: the policy, with all its knobs.
        bound: T* of the workload there; None for a single rank.
        tuner: searches for knobs as the job runs: on rank 0, where that is asked for.
        saved: where it keeps what it finds.
    """

    seen: StepProfile
    gradients: GradientBuffer
    workload: Workload
    cost: CostModel
    cluster: Cluster | None
    job: Job
    schedule: Spec
    bound: Bound | None
    tuner: Tuner | None = None
    saved: Saved | None = None


def runtime_plan(
    sideband: ControlGroup,
    seen: StepProfile,
    named: Sequence[tuple[str, nn.Parameter]],
    model: str,
    options: AttachOptions,
    measure: Callable[[], tuple[CostModel, Cluster]] | None = None,
) -> RuntimePlan:
    """The plan, on all ranks the same: it is agreed on ``sideband``, and the network is measured there.

    Args:
        sideband: of all ranks.
        seen: what this rank has observed.
        named: the parameters by task, with their names.
        model: its name, for people.
        options: of `foretrain.plugins.torch.attach`.
        measure: measures the network, on all ranks at once; each may find another. None all-reduces on ``sideband``.
    """
    names, parameters = [name for name, _ in named], [parameter for _, parameter in named]
    dtype = wire_dtype(options.compression)
    seen = slowest(sideband, seen)
    gradients = GradientBuffer(parameters, seen.order, dtype.itemsize if dtype else None)
    sizes = [gradients.size(task) for task in range(len(parameters))]
    where = f"{sideband.ranks} ranks of {parameters[0].device.type}"
    workload = workload_of(seen, names, sizes, model, where)
    if measure is not None:
        cost, cluster = measure()
    else:
        cost = sideband.cost(seen.crowding / 1000)
        cluster = cluster_of(cost, sideband.ranks) if sideband.ranks > 1 else None
    job = Job.of(workload, cost)
    # Rank 0's choice: floating point need not agree to the last digit on different machines.
    memory = _GPU_MEMORY if parameters[0].device.type == "cuda" else None
    tuner, saved, text = None, None, b""
    if sideband.rank == 0:
        if isinstance(options.schedule, SavedPlan):
            warn_of_differences(options.schedule, workload, cluster, options)
        schedule = decide(options.schedule, workload, cluster, seen.crowding / 1000, memory)
        if options.tune and cluster is not None and cluster.cost.per_byte:
            tuner, saved = search_of(options.schedule, schedule, workload, cluster)
            schedule = tuner.spec if tuner else schedule
        text = pack_spec(schedule)
    schedule = unpack_spec(sideband.share(text))
    optimum = bound(workload, job) if cluster is not None else None
    return RuntimePlan(seen, gradients, workload, cost, cluster, job, schedule, optimum, tuner, saved)


def slowest(sideband: ControlGroup, seen: StepProfile) -> StepProfile:
    """The observation of the rank that computes longest, on all ranks: the others will wait for it.

    How often a gradient comes in one pass, and how busy the cores are, is the most that any rank has seen.
    """
    computes = [row[0] for row in sideband.gather([seen.compute])]
    place = computes.index(max(computes))
    count = len(seen.order)
    times = [seen.forward, seen.backward, seen.update]
    rows = sideband.gather([*seen.fires, *seen.order, *seen.uses, *seen.releases, *times, seen.passes, seen.crowding])
    _, order, uses, releases = (rows[place][k * count : (k + 1) * count] for k in range(4))
    forward, backward, update, passes, _ = rows[place][4 * count :]
    return StepProfile(
        order=order,
        uses=uses,
        forward=forward,
        releases=releases,
        backward=backward,
        update=update,
        fires=[max(fires) for fires in zip(*(row[:count] for row in rows), strict=True)],
        passes=passes,
        crowding=max(row[-1] for row in rows),
    )


def decide(
    wanted: ScheduleRequest,
    workload: Workload,
    cluster: Cluster | None,
    crowding: float = 0.0,
    memory: float | None = None,
) -> Spec:
    """The policy with its knobs that ``wanted`` asks for: on rank 0, in a moment. Says what the planner has chosen.

    Args:
        wanted: a policy, whose open knobs are searched; or what leaves it to the planner.
        workload: observed.
        cluster: measured; None for a single rank.
        crowding: how busy the cores are, from 0 to 1.
        memory: bytes/s of the device's memory; None on a CPU.
    """
    if isinstance(wanted, SavedPlan):
        return wanted.schedule
    if not isinstance(wanted, Auto):
        return choose_knobs(wanted, workload, cluster)
    if cluster is None or cluster.cost.per_byte == 0:
        logger.info("auto: plain DDP: there is nobody to exchange gradients with, or it costs nothing")
        return Spec("ddp")
    choice = choose(workload, cluster, careful=True, crowding=crowding, memory=memory)
    for line in choice.lines:
        logger.info("%s", line)
    return choice.schedule


def warn_of_differences(saved: SavedPlan, workload: Workload, cluster: Cluster | None, options: AttachOptions) -> None:
    """A warning where ``saved`` was made for something else."""
    if cluster is None:
        found = ["one rank alone exchanges nothing"]
    else:
        here = fingerprint(workload, cluster, cluster.cost, cluster.workers)
        found = list(saved.differences(here, options.server is not None, options.compression))
    if found:
        logger.warning("the plan was made for something else: %s; foretrain tune makes another", "; ".join(found))


def choose_knobs(wanted: Spec, workload: Workload, cluster: Cluster | None) -> Spec:
    """``wanted`` with every knob that it leaves open at its best in the simulator: on rank 0, in a moment."""
    free = [knob for knob in POLICIES[wanted.name].knobs if knob.name not in wanted.knobs]
    if cluster is None or not free or cluster.cost.per_byte == 0:
        return wanted
    return tune(workload, cluster, wanted, careful=True)


def search_of(wanted: ScheduleRequest, chosen: Spec, workload: Workload, cluster: Cluster) -> tuple[Tuner | None, Saved | None]:
    """A search for the knobs that ``wanted`` leaves open, which begins with what was found before, or is ``chosen``.

    Knobs that a planner chose are as open as those that nobody named. Nothing, with a warning, where none is open.
    """
    plan = wanted if isinstance(wanted, Spec) else Spec(chosen.name, _mechanism(chosen))
    if not Space.of(plan, workload, running=True).free:
        logger.warning("tune: %s leaves no knob open, so that nothing is searched", plan)
        return None, None
    saved = Saved(folder(), workload, cluster, plan)
    known = saved.load()
    virtual = JobForecaster(workload, cluster, plan, earlier=known is not None)
    proposer = virtual.informed(known[0] if known else chosen, careful=True)
    return Tuner(proposer, virtual.again, known=known[1] if known else None), saved


def _mechanism(chosen: Spec) -> dict[str, float]:
    """The knobs of ``chosen`` that no search moves."""
    fixed = {knob.name for knob in POLICIES[chosen.name].knobs if not (knob.tunable or knob.noisy)}
    return {name: value for name, value in chosen.knobs.items() if name in fixed}


def replayed_order(schedule: Spec, workload: Workload, cost: CostModel, ranks: int) -> list[Chunk]:
    """The chunks that ``schedule`` sends in one steady step of the simulator, in order."""
    run = simulate(workload, cluster_of(cost, max(2, ranks)), schedule, trace=False)
    last = len(run.begins) - 2
    return [decision.chunk for decision in run.log if decision.step == last]
