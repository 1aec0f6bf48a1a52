"""Where the distance to the optimum goes: the virtual world tells it apart, cause by cause.

T* on links as fast as they are called ─ link → T* on links as fast as they are ─ policy → the schedule, were
operations free ─ operations → the forecast ─ unforeseen → the measurement
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import pairwise

from foretrain.network import Cluster
from foretrain.schedule import Spec
from foretrain.simulation import bound, simulate
from foretrain.units import Time
from foretrain.workload import Workload


@dataclass(frozen=True, slots=True)
class GapBreakdown:
    """By what shares of T* an iteration is longer than T*; they add up to T/T* − 1.

    Attributes:
        link: links carry less than they are called: headers, and gaps within a collective.
        policy: order, partitions, buckets and barrier.
        operations: what an operation costs whatever its size: agreement and hand-over (θ), floor and latency.
        unforeseen: what was measured beyond the forecast; contention for cores, mostly.
    """

    link: float
    policy: float
    operations: float
    unforeseen: float


def losses(
    workload: Workload, where: Cluster, schedule: str | Spec, *, optimum: Time, forecast: Time, measured: Time
) -> GapBreakdown:
    """The losses of ``schedule`` with knobs set, in an iteration that took ``measured`` ps.

    Args:
        workload: what is sent.
        where: the network with its operations' costs, as measured.
        schedule: with all its knobs.
        optimum: T* on links as fast as they are called, ps.
        forecast: of the schedule on ``where``, ps.
        measured: the iteration's time, ps.
    """
    free = dataclasses.replace(where, latency=0, overhead=0, floor=0)
    reachable = bound(workload, free).time
    ideal = simulate(workload, free, schedule, trace=False).iteration_time
    steps = (optimum, reachable, ideal, forecast, measured)
    link, policy, operations, unforeseen = ((after - before) / optimum for before, after in pairwise(steps))
    return GapBreakdown(link, policy, operations, unforeseen)
