"""Grid of usual operators: products, attention, convolutions, streaming, the optimizer, and copies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor
from torch.nn import functional

from foretrain.device.calls import Meta, OperatorCall, contiguous
from foretrain.device.work import Attention, Format, Gemm, HostCopy, MemoryWork, Work

Run = Callable[[], object]

_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_LARGEST_COPY: Final = 1 << 28
"""Bytes: the rate no longer changes, and pinned memory is taken from everybody."""


@dataclass(frozen=True, slots=True)
class OperatorProbe:
    """An operator to measure, by its work.

    Attributes:
        work: what it does.
        make: makes its tensors and returns the call.
        size: bytes of these tensors, about.
    """

    work: Work
    make: Callable[[], Run]
    size: int


@dataclass(frozen=True, slots=True)
class _Extent:
    """Shapes to measure of each kind; sizes as in `foretrain.device.work`."""

    formats: tuple[Format, ...]
    gemms: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    attention: tuple[tuple[int, int, int, int], ...]
    moved: tuple[int, ...]
    images: tuple[tuple[int, int, int, int, int], ...]
    parameters: tuple[int, ...]


_EXTENTS: Final = {
    ("cpu", True): _Extent(
        ("fp32",), ((64, 512), (64, 512), (64, 512)), ((2, 4, 128, 64),), (1 << 16, 1 << 22, 1 << 24),
        ((8, 16, 32, 32, 3), (8, 64, 16, 64, 1)), (1 << 16,),
    ),
    ("cpu", False): _Extent(
        ("fp32", "bf16"), ((16, 64, 256, 1024), (64, 256, 1024), (64, 256, 1024)),
        ((1, 8, 64, 64), (4, 8, 128, 64), (4, 8, 512, 64)), tuple(1 << power for power in range(12, 29, 2)),
        ((8, 3, 64, 32, 3), (8, 32, 32, 32, 3), (8, 64, 32, 128, 1), (8, 128, 16, 128, 3)), (1 << 16, 1 << 20, 1 << 24),
    ),
    ("cuda", True): _Extent(
        ("bf16", "fp32"), ((1024, 4096, 8192), (1024, 4096), (1024, 4096)),
        ((1, 16, 2048, 128), (4, 32, 4096, 128)), (1 << 20, 1 << 26, 1 << 30),
        ((64, 64, 56, 64, 3), (64, 256, 56, 64, 1)), (1 << 20, 1 << 26),
    ),
    ("cuda", False): _Extent(
        ("bf16", "fp16", "fp32"),
        ((256, 1024, 4096, 16384), (1024, 2048, 4096, 8192, 14336), (1024, 2048, 4096, 8192, 14336)),
        tuple(itertools.product((1, 2, 4, 8), (16, 32, 64), (1024, 2048, 4096, 8192), (64, 128))),
        tuple(1 << power for power in range(14, 33)),
        tuple((64, channels, edge, channels * wider, kernel) for channels, edge in ((64, 56), (128, 28), (256, 14),
              (512, 7)) for wider, kernel in ((1, 3), (4, 1))), (1 << 16, 1 << 20, 1 << 24, 1 << 28),
    ),
}  # fmt: skip


def probes(device: torch.device, quick: bool) -> list[OperatorProbe]:
    """Return the work to measure on ``device``; on a GPU it takes minutes, or less than one if ``quick``."""
    extent = _EXTENTS[device.type, quick]
    found = [_gemm(device, shape, one) for one in extent.formats for shape in itertools.product(*extent.gemms)]
    for shape, backward in itertools.product(extent.attention, (False, True)):
        found.append(_attention(device, shape, extent.formats[0], backward))
    found += [_streaming(device, size) for size in extent.moved]
    if device.type == "cuda":
        sizes = [size for size in extent.moved if size <= _LARGEST_COPY]
        found += [_copy(device, size, pinned) for size in sizes for pinned in (False, True)]
    return found


def calls(device: torch.device, quick: bool) -> list[OperatorCall]:
    """Return the calls to measure by their arguments: convolutions forward and backward, and AdamW in one kernel."""
    extent = _EXTENTS[device.type, quick]
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    found = [call for image in extent.images for call in convolutions(*image, dtype)]
    return [*found, *(_adamw(count) for count in extent.parameters)]


def convolutions(batch: int, channels: int, edge: int, filters: int, kernel: int, dtype: str) -> Iterator[OperatorCall]:
    """Yield a convolution forward and backward, with stride 1 and as many results as inputs."""
    image, weight = (
        contiguous((batch, channels, edge, edge), dtype),
        contiguous((filters, channels, kernel, kernel), dtype),
    )
    how = ((1, 1), (kernel // 2,) * 2, (1, 1), False, (0, 0), 1)
    yield OperatorCall("aten::convolution", (image, weight, None, *how))
    result = contiguous((batch, filters, edge, edge), dtype)
    yield OperatorCall("aten::convolution_backward", (result, image, weight, None, *how, (True, True, False)))


def _adamw(count: int) -> OperatorCall:
    tensor = contiguous((count,), "float32")
    lists: tuple[tuple[Meta, ...], ...] = ((tensor,),) * 4
    step = (contiguous((), "float32"),)
    numbers = (1e-3, 0.9, 0.999, 0.01, 1e-8)
    return OperatorCall("aten::_fused_adamw_", (*lists, (), step, *numbers, False, False, None, None))


def _gemm(device: torch.device, shape: tuple[int, ...], dtype: Format) -> OperatorProbe:
    m, n, k = shape
    work = Gemm(m, n, k, dtype=dtype)

    def make() -> Run:
        one, other = _random(device, (m, k), dtype), _random(device, (k, n), dtype)
        return lambda: torch.mm(one, other)

    return OperatorProbe(work, make, work.moved)


def _attention(device: torch.device, shape: tuple[int, int, int, int], dtype: Format, backward: bool) -> OperatorProbe:
    batch, heads, length, width = shape
    work = Attention(batch, heads, heads, length, length, width, dtype=dtype, backward=backward)

    def make() -> Run:
        query, key, value = (_random(device, (batch, heads, length, width), dtype) for _ in range(3))

        def forward() -> Tensor:
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

        if not backward:
            return forward
        with torch.enable_grad():
            inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
            result = forward()
        gradient = torch.ones_like(result)
        return lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True)

    return OperatorProbe(work, make, work.moved)


def _streaming(device: torch.device, moved: int) -> OperatorProbe:
    """Return a probe that adds a tensor to another: two are read, one is written."""
    count = max(1, moved // 12)

    def make() -> Run:
        one, other = _random(device, (count,), "fp32"), _random(device, (count,), "fp32")
        return lambda: one.add_(other)

    return OperatorProbe(MemoryWork(12 * count), make, 8 * count)


def _copy(device: torch.device, size: int, pinned: bool) -> OperatorProbe:
    def make() -> Run:
        source = torch.ones(size, dtype=torch.uint8, pin_memory=pinned)
        target = torch.empty(size, dtype=torch.uint8, device=device)
        return lambda: target.copy_(source, non_blocking=pinned)

    return OperatorProbe(HostCopy(size, pinned), make, size)


def _random(device: torch.device, shape: tuple[int, ...], dtype: Format) -> Tensor:
    return torch.empty(shape, device=device).uniform_(0.5, 1.5).to(cast(torch.dtype, _DTYPES[dtype]))
