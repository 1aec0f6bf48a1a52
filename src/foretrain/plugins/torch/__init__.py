"""PyTorch jobs whose communication is scheduled.

    attach             a model and its optimizer → `Attached`
    AllReduce          gradients are summed by collectives among the ranks
    BoundedLoss        the same over UDP, for a network that loses packets
    ParameterServer    gradients are summed, or applied, on servers
    Timeouts           how long ranks wait for each other

`attach` and `Attached` are imported on first use: only they need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretrain.comm.options import AllReduce, BoundedLoss, ParameterServer, Timeouts

if TYPE_CHECKING:
    from foretrain.plugins.torch.api import Attached, attach

__all__ = ["AllReduce", "Attached", "BoundedLoss", "ParameterServer", "Timeouts", "attach"]


def __getattr__(name: str) -> object:
    if name in ("attach", "Attached"):
        from foretrain.torch_version import require_torch

        require_torch("attach")
        from foretrain.plugins.torch import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
