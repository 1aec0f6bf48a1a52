"""Gradients in flat buffers, and their compression: half precision with error feedback.

There is one buffer per device and dtype, in the order of first use, so that a chunk is nearly always one contiguous
slice, reduced in place. Bytes of a task are bytes *on the wire*: with compression fewer than in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false

from foretrain.errors import unknown
from foretrain.tasks import Piece


class BufferSlice(NamedTuple):
    """Elements ``[start, end)`` of flat buffer ``buffer``."""

    buffer: int
    start: int
    end: int


class GradientBuffer:
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
        places: dict[tuple[torch.device, torch.dtype], int] = {}
        lengths: list[int] = []
        self._buffer = [0] * len(parameters)
        self._base = [0] * len(parameters)
        for index in order:
            parameter = parameters[index]
            place = places.setdefault((parameter.device, parameter.dtype), len(places))
            if place == len(lengths):
                lengths.append(0)
            self._buffer[index], self._base[index] = place, lengths[place]
            lengths[place] += parameter.numel()
        self._width = [wire or parameter.element_size() for parameter in parameters]
        self.flat = [torch.zeros(lengths[place], dtype=key[1], device=key[0]) for key, place in places.items()]
        self.views = [self._view(index, parameter) for index, parameter in enumerate(parameters)]

    def size(self, task: int) -> int:
        """Return the bytes of ``task`` on the wire."""
        return self.views[task].numel() * self._width[task]

    def runs(self, pieces: Sequence[Piece]) -> list[BufferSlice]:
        """Return the contiguous slices that cover ``pieces``, in order, with neighbours joined.

        A policy may cut between the bytes of an element; the element then belongs to the piece in which it ends, so
        that pieces that cover a task still cover every element once.
        """
        found: list[BufferSlice] = []
        for piece in pieces:
            width, base = self._width[piece.task], self._base[piece.task]
            start, end = base + piece.offset // width, base + (piece.offset + piece.size) // width
            if start < end:
                found.append(BufferSlice(self._buffer[piece.task], start, end))
        found.sort()
        joined: list[BufferSlice] = []
        for run in found:
            if joined and joined[-1].buffer == run.buffer and joined[-1].end == run.start:
                joined[-1] = BufferSlice(run.buffer, joined[-1].start, run.end)
            else:
                joined.append(run)
        return joined

    def slice(self, run: BufferSlice) -> torch.Tensor:
        """Return the elements of ``run``."""
        return self.flat[run.buffer][run.start : run.end]

    def _view(self, index: int, parameter: torch.Tensor) -> torch.Tensor:
        place = self.flat[self._buffer[index]][self._base[index] : self._base[index] + parameter.numel()]
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
