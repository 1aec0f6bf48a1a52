"""Workloads: one training step, from a model of the zoo, a recording or a file.

    workload = zoo("resnet50", batch=64, device="v100")      # from the architecture and a GPU's rates; no torch
    workload = record(step, model)                           # from a real step on this machine; needs torch
    workload = load("mine.toml")                             # from a file; `save` writes one

All give a `Workload`: layers with times in forward order, gradients with sizes and release times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretrain.workload.file import load, save
from foretrain.workload.models import zoo, zoo_models
from foretrain.workload.step import Gradient, Layer, Workload

if TYPE_CHECKING:
    from foretrain.workload.recorder import record

__all__ = ["Gradient", "Layer", "Workload", "load", "record", "save", "zoo", "zoo_models"]


def __getattr__(name: str) -> object:
    # PEP 562: the recorder is for those who have torch, so nobody else pays for it.
    if name == "record":
        from foretrain.workload.recorder import record

        return record
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
