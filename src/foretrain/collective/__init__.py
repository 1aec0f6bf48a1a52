"""Collectives as DAGs of transfers between ranks: one algorithm a file, each proved on data by `verify`."""

from foretrain.collective.algorithms import ALGORITHMS, Offer, build
from foretrain.collective.hdrm import Seats, contention, flows_on_links, hdrm_mapping
from foretrain.collective.plan import WHOLE, Draft, Operation, Plan, assembled, rounds, steps_on_critical_path
from foretrain.collective.verification import PlanError, verify

__all__ = [
    "ALGORITHMS",
    "WHOLE",
    "Draft",
    "Offer",
    "Operation",
    "Plan",
    "PlanError",
    "Seats",
    "assembled",
    "build",
    "contention",
    "flows_on_links",
    "hdrm_mapping",
    "rounds",
    "steps_on_critical_path",
    "verify",
]
