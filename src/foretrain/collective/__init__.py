"""Collectives as DAGs of transfers between ranks: one algorithm a file, each proved on data by `verify`."""

from foretrain.collective.plan import WHOLE, Draft, Operation, Plan, assembled
from foretrain.collective.progress import rounds, steps_on_critical_path
from foretrain.collective.verification import PlanError, verify

__all__ = ["WHOLE", "Draft", "Operation", "Plan", "PlanError", "assembled", "rounds", "steps_on_critical_path", "verify"]
