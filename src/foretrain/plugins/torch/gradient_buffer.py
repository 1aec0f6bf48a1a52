"""Gradients in flat tensors, and their compression: half precision with error feedback."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false

from foretrain.comm.buffers import BufferSlice, FlatLayout
from foretrain.errors import unknown


class GradientBuffer(FlatLayout):
    """Flat buffers for the gradients of ``parameters``.

    Args:
        parameters: indexed by task.
        order: task indices, first used first; the layout.
        wire: bytes per element on the wire; None sends elements as they are.

    Attributes:
        flat: the buffers, one-dimensional.
        views: per task, its slice, in the shape and memory layout of its parameter.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], order: Sequence[int], wire: int | None = None) -> None:
        super().__init__(
            [parameter.numel() for parameter in parameters],
            [(parameter.device, parameter.dtype) for parameter in parameters],
            [wire or parameter.element_size() for parameter in parameters],
            order,
        )
        self.flat = [
            torch.zeros(length, dtype=dtype, device=device)
            for length, (device, dtype) in zip(self.lengths, self.kinds, strict=True)
        ]
        self.views = [self._view(task, parameter) for task, parameter in enumerate(parameters)]

    def slice(self, run: BufferSlice) -> torch.Tensor:
        """Return the elements of ``run``."""
        return self.flat[run.buffer][run.start : run.end]

    def _view(self, task: int, parameter: torch.Tensor) -> torch.Tensor:
        place = self.slice(self.place(task))
        if parameter.is_contiguous():
            return place.view(parameter.shape)
        dense = torch.empty_strided(parameter.shape, parameter.stride(), device="meta")
        if is_non_overlapping_and_dense_or_false(dense):
            return place.as_strided(parameter.shape, parameter.stride())
        return place.view(parameter.shape)


_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def wire_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype called ``name``; None for None."""
    if name is None:
        return None
    if name not in _DTYPES:
        raise unknown("compression", name, _DTYPES)
    return _DTYPES[name]


class Rounding:
    """Compression of slices of flat buffers, with error feedback.

    Args:
        flat: the buffers; each gets a residual of its own size.
        dtype: to round to.
    """

    def __init__(self, flat: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._residuals = [torch.zeros_like(buffer) for buffer in flat]

    def round(self, run: BufferSlice, values: torch.Tensor) -> torch.Tensor:
        """Return rounded ``values``, the elements of ``run``, with the error of the last rounding added."""
        residual = self._residuals[run.buffer][run.start : run.end]
        residual.add_(values)
        sent = residual.to(self._dtype)
        residual.sub_(sent)
        # The receiver must see an overflow (GradScaler checks for it), but it must not be fed back.
        residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return sent
