"""What the watched steps amount to: one workload, one network and one schedule, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import nn

from foretrain.network import Cluster
from foretrain.runtime.compression import wire_dtype
from foretrain.runtime.exchange import pack_spec, unpack_spec
from foretrain.runtime.gradients import Gradients
from foretrain.runtime.observation import Observed, workload_of
from foretrain.runtime.options import Options
from foretrain.runtime.sideband import Sideband
from foretrain.schedule import POLICIES, Bound, Cost, Job, Spec, bound
from foretrain.tasks import Chunk
from foretrain.tune import tune
from foretrain.units import COST_SHIFT, SECOND
from foretrain.virtual import simulate
from foretrain.workload.step import Workload


class Plan(NamedTuple):
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
    """

    seen: Observed
    gradients: Gradients
    workload: Workload
    cost: Cost
    cluster: Cluster | None
    job: Job
    schedule: Spec
    bound: Bound | None


def plan(
    sideband: Sideband,
    seen: Observed,
    named: Sequence[tuple[str, nn.Parameter]],
    model: str,
    options: Options,
    measure: Callable[[], tuple[Cost, Cluster]] | None = None,
) -> Plan:
    """The plan, on all ranks the same: it is agreed on ``sideband``, and the network is measured there.

    Args:
        sideband: of all ranks.
        seen: what this rank has observed.
        named: the parameters by task, with their names.
        model: its name, for people.
        options: of `foretrain.runtime.attach`.
        measure: measures the network, on all ranks at once; each may find another. None all-reduces on ``sideband``.
    """
    names, parameters = [name for name, _ in named], [parameter for _, parameter in named]
    dtype = wire_dtype(options.compression)
    seen = slowest(sideband, seen)
    gradients = Gradients(parameters, seen.order, dtype.itemsize if dtype else None)
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
    text = pack_spec(choose_knobs(options.schedule, workload, cluster)) if sideband.rank == 0 else b""
    schedule = unpack_spec(sideband.share(text))
    optimum = bound(workload, job) if cluster is not None else None
    return Plan(seen, gradients, workload, cost, cluster, job, schedule, optimum)


def slowest(sideband: Sideband, seen: Observed) -> Observed:
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
    return Observed(
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


def cluster_of(cost: Cost, ranks: int) -> Cluster:
    """A cluster whose all-reduce costs ``cost``: the measured network, for the simulator."""
    seconds_per_byte = cost.per_byte / (1 << COST_SHIFT) / SECOND
    rate = 2 * (ranks - 1) / ranks / max(seconds_per_byte, 1e-15)
    one_way = cost.latency // (2 * (ranks - 1))
    return Cluster(workers=ranks, up=rate, down=rate, latency=one_way, overhead=cost.overhead, floor=cost.floor)


def choose_knobs(wanted: Spec, workload: Workload, cluster: Cluster | None) -> Spec:
    """``wanted`` with every knob that it leaves open at its best in the simulator: on rank 0, in a moment."""
    free = [knob for knob in POLICIES[wanted.name].knobs if knob.name not in wanted.knobs]
    if cluster is None or not free or cluster.cost.per_byte == 0:
        return wanted
    return tune(workload, cluster, wanted, careful=True)


def replayed_order(schedule: Spec, workload: Workload, cost: Cost, ranks: int) -> list[Chunk]:
    """The chunks that ``schedule`` sends in one steady step of the simulator, in order."""
    run = simulate(workload, cluster_of(cost, max(2, ranks)), schedule, trace=False)
    last = len(run.begins) - 2
    return [decision.chunk for decision in run.log if decision.step == last]
