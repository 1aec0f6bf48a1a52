"""GPUs: what the datasheet promises, which part of it training code gets, and how long an operator takes.

gpu = device.preset("h100")
gpu.time("gemm", "fp16", flops=2 * 4096**3, moved=3 * 2 * 4096**2)      # picoseconds, by the roofline

model = device.OperatorModel(gpu)
model.estimate(device.Gemm(8192, 4096, 4096))                           # by measured tables; says how it knows

From an ATen operator to its `Work`: `foretrain.device.aten`. What a user measured: `foretrain.device.calibration`.
"""

from foretrain.device.gpu import (
    HOST_LAUNCH,
    PRECISIONS,
    Arithmetic,
    Device,
    Kind,
    Precision,
    element_size,
    forecast_range,
    host_launch,
    overlap_slowdown,
    stack_factor,
    stacks,
)
from foretrain.device.model import OperatorEstimate, OperatorModel, Provenance
from foretrain.device.presets import preset, preset_names
from foretrain.device.work import Attention, Convolution, Gemm, HostCopy, MemoryWork, Nothing, Unknown, Work

__all__ = [
    "HOST_LAUNCH",
    "PRECISIONS",
    "Arithmetic",
    "Attention",
    "Convolution",
    "Device",
    "Gemm",
    "HostCopy",
    "Kind",
    "MemoryWork",
    "Nothing",
    "OperatorEstimate",
    "OperatorModel",
    "Precision",
    "Provenance",
    "Unknown",
    "Work",
    "element_size",
    "forecast_range",
    "host_launch",
    "overlap_slowdown",
    "preset",
    "preset_names",
    "stack_factor",
    "stacks",
]
