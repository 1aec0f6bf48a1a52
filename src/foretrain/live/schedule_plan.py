"""From watched steps to a policy: what all members of a group have seen becomes one job and one schedule.

As the real runtime does (`foretrain.plugins.torch.runtime_plan`): the slowest member counts, and knobs that were left
open are searched by simulating the observed step on the network whose cost is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretrain.comm.observation import workload_of
from foretrain.live.device.model_registration import ModelAnnouncement
from foretrain.planner import tune
from foretrain.planner.backends import cluster_of
from foretrain.schedule import Bound, CostModel, Job, ScheduledPolicy, Spec, bound, spec
from foretrain.workload.step import Workload


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """How a model's gradients are exchanged.

    Attributes:
        workload: the step of the slowest member, as it was observed.
        job: the scheduler's view of it on the simulated network.
        schedule: the policy with its knobs.
        policy: the same, running.
        bound: T* of that step on that network.
    """

    workload: Workload
    job: Job
    schedule: Spec
    policy: ScheduledPolicy
    bound: Bound

    @property
    def warmup(self) -> int:
        """Rounds after which the policy's decisions repeat."""
        return self.policy.warmup


def plan_schedule(announced: Sequence[ModelAnnouncement], cost: CostModel) -> SchedulePlan:
    """The plan for members that have announced this, in a network where an all-reduce costs ``cost``."""
    slowest = max(announced, key=lambda one: one.seen.compute)
    place = f"{len(slowest.ranks)} simulated ranks"
    workload = workload_of(slowest.seen, slowest.names, slowest.sizes, slowest.model, place)
    job = Job.of(workload, cost)
    wanted = spec(slowest.schedule)
    if len(slowest.ranks) > 1 and cost.per_byte:
        wanted = tune(workload, cluster_of(cost, len(slowest.ranks)), wanted, careful=True)
    return SchedulePlan(workload, job, wanted, wanted.build(job), bound(workload, job))
