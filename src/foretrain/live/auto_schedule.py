"""``foretrain simulate --schedule auto`` and ``--plan``: what a short simulation has watched is what is planned for.

A simulated rank must know its policy before its first step is scheduled, and nobody can tell it later. So the script
runs twice: a few steps under plain DDP, and again under what was chosen for them.
"""

from __future__ import annotations

import dataclasses

from foretrain.device import preset_names
from foretrain.live.device.settings import WATCHED
from foretrain.live.schedule_plan import SchedulePlan
from foretrain.live.simulate import Simulated
from foretrain.network import Cluster
from foretrain.planner import Recommendation, SavedPlan, choose
from foretrain.planner.backends import cluster_of
from foretrain.planner.plan import fingerprint

PLANNING_STEPS = WATCHED + 1
"""What is watched, and one under the policy."""


def recommended_schedule(watched: Simulated, device: str | None) -> Recommendation | None:
    """The best schedule for the largest model of a script that ran under a policy; None where none did.

    ``device`` is what the cluster's GPUs are.
    """
    found = _largest_model(watched)
    if found is None or found[1] < 2:
        return None
    plan, ranks = found
    return choose(plan.workload, _plan_cluster(plan, ranks, device), careful=True)


def plan_differences(done: Simulated, saved: SavedPlan) -> tuple[str, ...]:
    """In what ``saved`` was made for something else than what was simulated."""
    found = _largest_model(done)
    if found is None:
        return ()
    plan, ranks = found
    here = fingerprint(plan.workload, None, plan.job.cost, ranks)
    return saved.differences(here, served=False, compression=saved.compression)


def _largest_model(done: Simulated) -> tuple[SchedulePlan, int] | None:
    plans = [(one.plan, len(one.group.members)) for one in done.story.schedules if one.plan is not None]
    return max(plans, key=lambda each: each[0].workload.size, default=None)


def _plan_cluster(plan: SchedulePlan, ranks: int, device: str | None) -> Cluster:
    known = device if device in preset_names() else None
    return dataclasses.replace(cluster_of(plan.job.cost, ranks), device=known)
