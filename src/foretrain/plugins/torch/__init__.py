"""PyTorch jobs whose communication is scheduled.

    attach       a model and its optimizer → `Attached`

Names are imported on first use: only `attach` needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foretrain.plugins.torch.api import Attached, attach

__all__ = ["Attached", "attach"]


def __getattr__(name: str) -> object:
    if name in ("attach", "Attached"):
        from foretrain.torch_version import require_torch

        require_torch("attach")
        from foretrain.plugins.torch import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
