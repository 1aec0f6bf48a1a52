"""GPUs as a table of rates: what the datasheet promises, and which part of it training code gets.

gpu = device.preset("v100")
gpu.time("gemm", "fp16", flops=2 * 4096**3, moved=3 * 2 * 4096**2)      # picoseconds
"""

from foretrain.device.gpu import PRECISIONS, Arithmetic, Device, Kind, Precision, element_size
from foretrain.device.presets import preset, preset_names

__all__ = ["PRECISIONS", "Arithmetic", "Device", "Kind", "Precision", "element_size", "preset", "preset_names"]
