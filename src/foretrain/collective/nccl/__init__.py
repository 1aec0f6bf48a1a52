"""NCCL's choice for a collective: algorithm, protocol, channels, and its time.

choice = nccl.choose("all_reduce", 2**28, ranks=8, gpu="H100")
choice.algorithm, choice.protocol, choice.time      # nvls, Simple, 1_126_148_558 ps: 417 GB/s on the bus
"""

from foretrain.collective.nccl.choice import Choice, choose
from foretrain.collective.nccl.generation import GPUS, Generation, GpuProduct, ProtocolCurve, gpu_named
from foretrain.collective.nccl.variants import Algorithm, Protocol, bus_bandwidth, bus_factor

__all__ = [
    "GPUS",
    "Algorithm",
    "Choice",
    "Generation",
    "GpuProduct",
    "Protocol",
    "ProtocolCurve",
    "bus_bandwidth",
    "bus_factor",
    "choose",
    "gpu_named",
]
