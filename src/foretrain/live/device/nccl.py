"""What communications are called in a profiler's traces."""

from __future__ import annotations

_KERNELS = {
    "all_reduce": "AllReduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "barrier": "AllReduce",
}
"""NCCL's own; everything else it does by sends and receives."""
_NAMES = {
    "all_reduce": "allreduce",
    "all_gather": "_allgather_base",
    "reduce_scatter": "_reduce_scatter_base",
    "all_to_all": "all_to_all",
}
"""What ProcessGroupNCCL calls them, where that is another name."""


def kernel_of(operation: str) -> str:
    """The kernel that NCCL runs for ``operation``, one of `foretrain.live.event_log.OPERATIONS` or a message."""
    return f"ncclDevKernel_{_KERNELS.get(operation, 'SendRecv')}"


def call_of(operation: str) -> str:
    """What ProcessGroupNCCL calls ``operation``."""
    return _NAMES.get(operation, operation)
