"""Simulated CUDA device: device type ``cuda`` in a stock CPU build of PyTorch, without data or compute.

An extension in C++ (``native/``, compiled on first use by `native_build`) makes ``torch.empty(device="cuda")`` an
ordinary tensor, so autograd, autocast, DistributedDataParallel's reducer, FSDP and DTensor see what they see on a GPU.
Its kernels infer shapes, keep real values where control flow may depend on them, and write what a GPU would do into the
rank's log (`foretrain.live.event_log`). The rest of the package is Python around it:

`operators` operators with kernels on CUDA, shape functions, FlexAttention · `cuda` and `streams` the C part of
``torch.cuda`` · `process_groups` collectives and stores · `clocks` virtual time · `operator_cost` the time of an
operator · `compiler` ``torch.compile`` · `profiler` ``torch.profiler`` · `rank` one rank: the device activated, the
script run · `fork_server` the process that all ranks are forked from.
"""

from __future__ import annotations

from typing import Any


def put(owner: Any, /, **values: Any) -> None:
    """Set attributes of ``owner``, a module or class, whether or not it has them."""
    for name, value in values.items():
        setattr(owner, name, value)
