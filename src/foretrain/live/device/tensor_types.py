"""The tensor types of old, ``torch.cuda.FloatTensor`` and its like, which make tensors in a build with CUDA only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from foretrain.live.device import put


class _TensorType(type):
    """A type whose instances are the CUDA tensors of one ``dtype``; called, it makes one.

    PyTorch knows types by their names. So a type has the full name of the one that it replaces, `plain`.
    """

    plain: type
    dtype: torch.dtype

    def __call__(cls, *values: Any, device: Any = "cuda") -> torch.Tensor:
        """Return a tensor of a size, given as numbers or ``torch.Size``, or else of these values."""
        if len(values) == 1 and isinstance(values[0], torch.Size):
            return torch.empty(values[0], dtype=cls.dtype, device=device)
        if all(isinstance(value, int) for value in values):
            return torch.empty(values or 0, dtype=cls.dtype, device=device)
        return torch.as_tensor(*values, dtype=cls.dtype, device=device)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.plain)


def install() -> None:
    """Replace the types of `torch.cuda`, and let one be the default."""
    for name, dtype in _DTYPES.items():
        plain: Any = getattr(torch.cuda, name)
        put(torch.cuda, **{name: _TensorType(f"torch.cuda.{name}", (), {"plain": plain, "dtype": dtype})})
    set_default = torch.set_default_tensor_type
    put(torch, set_default_tensor_type=lambda t: _set_default(t, set_default))


_DTYPES = {
    "BFloat16Tensor": torch.bfloat16, "BoolTensor": torch.bool, "ByteTensor": torch.uint8,
    "CharTensor": torch.int8, "DoubleTensor": torch.float64, "FloatTensor": torch.float32,
    "HalfTensor": torch.float16, "IntTensor": torch.int32, "LongTensor": torch.int64, "ShortTensor": torch.int16,
}  # fmt: skip


def _set_default(chosen: Any, set_default: Callable[[Any], None]) -> None:
    """Make tensors of a type by default, which is a type or its name."""
    if isinstance(chosen, str) and chosen.startswith("torch.cuda."):
        chosen = getattr(torch.cuda, chosen.rpartition(".")[2])
    if isinstance(chosen, _TensorType):
        torch.set_default_dtype(chosen.dtype)
        torch.set_default_device("cuda")
    else:
        torch.set_default_device(None)
        set_default(chosen)
