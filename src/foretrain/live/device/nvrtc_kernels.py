"""Kernels that ``torch.cuda._compile_kernel`` makes of CUDA C++: launched, but neither compiled nor run.

A launch reads what its source has pointers to constants for, and writes what the other pointers point to.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from foretrain.live.device import put
from foretrain.live.device.custom_kernels import launch, without_comments

_MOST: Final = (2**31 - 1, 65_535, 65_535, 1024, 1024, 64)
"""The largest grid and block that CUDA launches, by dimension (CUDA C++ Programming Guide, "Compute Capabilities")."""
_MOST_THREADS: Final = 1024
"""Of a block."""
_SHARED: Final = 48 << 10
"""Bytes of shared memory from which a kernel needs to be configured for them."""


def install() -> None:
    """Make ``torch.cuda`` compile nothing."""
    put(torch.cuda, _compile_kernel=CompiledKernel)


class CompiledKernel:
    """Stands for ``torch.cuda._utils._CudaKernel``, which it refuses the same arguments as.

    Args:
        kernel_source: in CUDA C++.
        kernel_name: of the function in it, for a template with its arguments.
        options: of the compiler.
    """

    def __init__(self, kernel_source: str, kernel_name: str, *options: object, **named: object) -> None:
        self._name = kernel_name.partition("<")[0].rpartition("::")[2]
        self._parameters = _parameters(kernel_source, self._name)
        self._shared = 0

    @torch.compiler.disable  # as the driver's launch, which Dynamo does not look into
    def __call__(
        self,
        grid: Sequence[int] = (1, 1, 1),
        block: Sequence[int] = (1, 1, 1),
        args: Sequence[Any] | None = None,
        shared_mem: int = 0,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Launch it on ``stream``, or else on the current one."""
        arguments = self._named(args or ())
        if shared_mem >= _SHARED and shared_mem > self._shared:
            configured = f"only {self._shared} bytes configured" if self._shared else "not configured"
            raise RuntimeError(
                f"Kernel requires {shared_mem} bytes of shared memory (>= 48KB), but {configured}. Call"
                " kernel.set_shared_memory_config(shared_mem) after compilation and before launching the kernel."
            )
        sizes = grid[0], grid[1], grid[2], block[0], block[1], block[2]
        fits = all(1 <= size <= most for size, most in zip(sizes, _MOST, strict=True))
        if not fits or math.prod(sizes[3:]) > _MOST_THREADS:
            raise RuntimeError(
                f"CUDA error: invalid argument: kernel {self._name} with a grid of {sizes[:3]} and a block of"
                f" {sizes[3:]}; they go from 1 to {_MOST[:3]} and {_MOST[3:]}, and a block has {_MOST_THREADS} threads"
            )
        constant = {name for name in arguments if self._parameters.get(name)}
        with torch.cuda.stream(stream):
            launch(self._name, arguments, constant, arguments.keys() - constant)

    def set_shared_memory_config(self, shared_mem_bytes: int) -> None:
        """Let launches have so many bytes of shared memory."""
        most = torch.cuda.get_device_properties().shared_memory_per_block_optin
        if shared_mem_bytes > most:
            raise RuntimeError(
                f"Requested shared memory ({shared_mem_bytes} bytes) exceeds device limit ({most} bytes). Consider"
                " reducing block size or shared memory usage."
            )
        self._shared = shared_mem_bytes

    def _named(self, args: Sequence[Any]) -> dict[str, Any]:
        """Return arguments by their names in the source, where those are known."""
        names = [*self._parameters, *(f"argument{place}" for place in range(len(self._parameters), len(args)))]
        return {name: _checked(value) for name, value in zip(names, args, strict=False)}


def _checked(value: Any) -> Any:
    if isinstance(value, int | float):
        return value
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"Unsupported argument type: {type(value)}")
    if value.is_cuda:
        return value
    if not value.is_pinned():
        raise ValueError("All tensor arguments must be CUDA tensors or pinned CPU tensors")
    return None  # not in the GPU's memory, whose bytes take time


def _parameters(source: str, function: str) -> Mapping[str, bool]:
    """Return the names of a kernel's parameters in order, and whether each points to constants; none if not found."""
    declared = rf"__global__[^;{{}}]*?\b{re.escape(function)}\s*\(([^;{{}}]*?)\)\s*[;{{]"
    found = re.search(declared, without_comments(source))
    texts = re.sub(r"<[^<>]*>", "", found[1]).split(",") if found else []
    named = [(re.search(r"(\w+)\s*(?:\[\w*\]\s*)?$", text), text.rpartition("*")[0]) for text in texts]
    constant = re.compile(r"\bconst\b")
    return {name[1]: bool(constant.search(pointed)) for name, pointed in named if name and name[1] != "void"}
