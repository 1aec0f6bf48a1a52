"""The policies, one file each; schedules as data; and the optimum they are measured against."""

from foretrain.schedule.bounds import Bound, bound
from foretrain.schedule.job import CostModel, Job, Knob
from foretrain.schedule.policies import AUTO, IDEAL, POLICIES, ScheduledPolicy, Spec, spec

__all__ = ["AUTO", "IDEAL", "POLICIES", "Bound", "CostModel", "Job", "Knob", "ScheduledPolicy", "Spec", "bound", "spec"]
