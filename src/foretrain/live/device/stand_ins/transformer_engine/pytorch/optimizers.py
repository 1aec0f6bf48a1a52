"""Optimizers whose step is one kernel for many tensors: those of Apex."""

from foretrain.live.device.stand_ins.apex.optimizers import FusedAdam, FusedSGD

__all__ = ["FusedAdam", "FusedSGD"]
