"""Work of an operator on a GPU, without its time: the arithmetic of a shape, or the bytes it moves.

A number format is ``"fp64"``, ``"fp32"``, ``"tf32"``, ``"bf16"``, ``"fp16"``, ``"fp8"``, ``"fp8_block"`` (with one
scale for each block of 128 numbers, not for each row or tensor), ``"fp4"`` (with one for 16) or ``"int8"``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Format: TypeAlias = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp8_block", "fp4", "int8"]
FORMATS: tuple[Format, ...] = get_args(Format)

Algorithm: TypeAlias = Literal["flash", "cudnn", "efficient", "triton", "best"]
"""Whose attention: FlashAttention 2 (PyTorch's), cuDNN's, xFormers' memory-efficient one, the first FlashAttention in
Triton, or the measured best."""

_BITS: dict[Format, int] = {
    "fp64": 64, "fp32": 32, "tf32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "fp8_block": 8, "fp4": 4, "int8": 8,
}  # fmt: skip


def format_bits(name: Format) -> int:
    """Return the bits of one number."""
    return _BITS[name]


@dataclass(frozen=True, slots=True)
class Gemm:
    """``batch`` products of an ``(m, k)`` with a ``(k, n)`` matrix.

    Attributes:
        rowwise: each row of the one factor and each column of the other has a scale of its own.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    dtype: Format = "bf16"
    rowwise: bool = False

    @property
    def flops(self) -> int:
        """Return multiplications and additions."""
        return 2 * self.m * self.n * self.k * self.batch

    @property
    def moved(self) -> int:
        """Return the bytes of each matrix crossing the memory bus once; results have two bytes or more."""
        bits = format_bits(self.dtype)
        return self.batch * (bits * (self.m + self.n) * self.k + max(bits, 16) * self.m * self.n) // 8


@dataclass(frozen=True, slots=True)
class Attention:
    """Fused attention of ``(batch, heads, queries, head_dim)`` to ``(batch, kv_heads, keys, head_dim)``.

    Attributes:
        value_dim: numbers of a head of values and of the result; 0 for ``head_dim``.
        causal: query i sees the keys up to i only.
        window: how many keys a query sees at most, those around it; 0 for all.
        backward: the gradients of queries, keys and values instead of the result.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool = True
    dtype: Format = "bf16"
    backward: bool = False
    algorithm: Algorithm = "flash"
    window: int = 0
    value_dim: int = 0

    @property
    def seen(self) -> int:
        """Return how many keys a query sees at most."""
        return min(self.window or self.keys, self.keys)

    @property
    def flops(self) -> int:
        """Return the operations of two products forward and five backward, masked ones left out.

        One forward and two backward go along a head of values, the others along one of keys.
        """
        rising = min(self.queries, self.seen) if self.causal else 0  # queries that see one key more each
        pairs = rising * (rising + 1) // 2 + (self.queries - rising) * self.seen
        of_keys, of_values = (3, 2) if self.backward else (1, 1)
        each = of_keys * self.head_dim + of_values * (self.value_dim or self.head_dim)
        return 2 * self.batch * self.heads * pairs * each

    @property
    def moved(self) -> int:
        """Return the bytes of queries, keys, values and result; backward these, their gradients and the sums of the
        softmax."""
        rows = self.heads * self.queries + self.kv_heads * self.keys
        once = self.batch * rows * (self.head_dim + (self.value_dim or self.head_dim)) * format_bits(self.dtype) // 8
        return 2 * once + 4 * self.batch * self.heads * self.queries if self.backward else once


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution: ``flops`` as if done directly, ``moved`` bytes read and written.

    ``winograd`` says that it is one of 3×3 or 5×5 with stride 1, for which Winograd's algorithm may be used.
    """

    flops: int
    moved: int
    dtype: Format = "bf16"
    winograd: bool = False


@dataclass(frozen=True, slots=True)
class MemoryWork:
    """Kernels whose time is that of the bytes they read and write, ``moved`` in all ``kernels`` together.

    Attributes:
        rate: bytes/s that they move at most, whatever the memory could; 0 where the memory alone limits them.
    """

    moved: int
    kernels: int = 1
    rate: int = 0


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A copy between the memories of host and GPU; ``pinned`` when the host's pages cannot be swapped out."""

    moved: int
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Unknown:
    """An operator without a rule: it costs at least the ``moved`` bytes of its arguments and results.

    Attributes:
        flops: multiplications and additions, as far as they are known.
        dtype: of those.
        efficiency: the part of the GPU's peak that they are taken to reach.
    """

    moved: int
    flops: int = 0
    dtype: Format = "fp32"
    efficiency: float = 1.0


@dataclass(frozen=True, slots=True)
class Nothing:
    """No kernel at all: a view, an allocation, a question about a shape."""


Work: TypeAlias = Gemm | Attention | Convolution | MemoryWork | HostCopy | Unknown | Nothing
"""Work of one operator."""

WORKS: dict[str, type] = {
    "Gemm": Gemm,
    "Attention": Attention,
    "Convolution": Convolution,
    "Memory": MemoryWork,
    "HostCopy": HostCopy,
    "Unknown": Unknown,
}
"""Kinds of work by their names in files."""
