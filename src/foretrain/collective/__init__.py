"""Collectives as DAGs of transfers between ranks: one algorithm a file, each proved on data by `verify`."""

from foretrain.collective.plan import WHOLE, Draft, Operation, Plan

__all__ = ["WHOLE", "Draft", "Operation", "Plan"]
