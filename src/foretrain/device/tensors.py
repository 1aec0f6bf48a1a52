"""Tensors as their metadata: what a kernel's memory traffic is counted from, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from foretrain.device.work import Format

_SIZES = {
    "float64": 8, "complex64": 8, "int64": 8, "uint64": 8, "complex128": 16,
    "float32": 4, "int32": 4, "uint32": 4, "complex32": 4, "qint32": 4,
    "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2,
}  # fmt: skip
"""Bytes of an element of those dtypes that have more than one."""

_FORMATS: dict[str, Format] = {
    "float64": "fp64",
    "complex128": "fp64",
    "float32": "fp32",
    "complex64": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "int8": "int8",
    "uint8": "int8",
}


class Meta(NamedTuple):
    """A tensor without its values.

    Attributes:
        shape: elements along each dimension.
        stride: elements from one to the next; 0 along a broadcast dimension.
        dtype: as torch prints it, without ``torch.``.
        device: ``"cuda:0"``, ``"cpu"``.
        pinned: host memory whose pages cannot be swapped out.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str = "cuda:0"
    pinned: bool = False


def contiguous(shape: tuple[int, ...], dtype: str = "bfloat16", device: str = "cuda:0") -> Meta:
    """A tensor laid out row by row."""
    stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return Meta(shape, stride, dtype, device)


def elements(tensor: Meta) -> int:
    """How many numbers the tensor shows."""
    return math.prod(tensor.shape)


def stored(tensor: Meta) -> int:
    """How many numbers a kernel that reads all of it fetches: broadcast ones once."""
    return math.prod(size for size, step in zip(tensor.shape, tensor.stride, strict=True) if step or size == 0)


def element_bytes(tensor: Meta) -> int:
    """Bytes of one element; two numbers of 4 bits are one element."""
    return _SIZES.get(tensor.dtype, 1)


def moved(*tensors: Meta | None) -> int:
    """Bytes that reading or writing each tensor once moves."""
    return sum(stored(tensor) * element_bytes(tensor) for tensor in tensors if tensor is not None)


def tensors_in(values: object) -> Iterator[Meta]:
    """Every tensor among arguments or results, also inside lists."""
    if isinstance(values, Meta):
        yield values
    elif isinstance(values, tuple):
        for value in values:
            yield from tensors_in(value)


def number_format(tensor: Meta) -> Format:
    """How a matrix product with such factors is computed."""
    return "fp8" if tensor.dtype.startswith("float8") else _FORMATS.get(tensor.dtype, "fp32")
