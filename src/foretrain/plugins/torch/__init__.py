"""The real world: a PyTorch job whose communication is scheduled, and a paced pipe to test policies on a real clock.

    attach       a model and its optimizer → `Attached`
    WallWorld    threads and a clock, no tensors

Names are imported on first use: only `attach` needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretrain.comm.wall_world import WallWorld

if TYPE_CHECKING:
    from foretrain.plugins.torch.api import Attached, attach

__all__ = ["Attached", "WallWorld", "attach"]


def __getattr__(name: str) -> object:
    if name in ("attach", "Attached"):
        from foretrain.torch_version import require_torch

        require_torch("attach")
        from foretrain.plugins.torch import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
