"""Host copies of gradients as bytes on the wire, and of sums as gradients.

A push sends a copy, which is kept for two rounds, or longer if servers run optimizers: a sum overwrites its gradient in
the flat buffer, and the push may have to be repeated after that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from foretrain.comm.buffers import BufferSlice
from foretrain.comm.ps.placement import Declaration, Declared, Optimized, dtype_name
from foretrain.network.switch_cluster import MESSAGE
from foretrain.plugins.torch.gradient_buffer import GradientBuffer, Rounding
from foretrain.plugins.torch.streams import HostStreams
from foretrain.tasks import Piece, Task


class _Buffer(NamedTuple):
    """Host copies of one flat buffer.

    Attributes:
        kind: dtype that is sent.
        received: sums as they were sent, or parameters; the flat buffer itself if its type and device are the same.
    """

    kind: torch.dtype
    received: torch.Tensor


class Staging:
    """Host buffers of the bytes of ``gradients`` that are in flight.

    Args:
        gradients: the flat buffers.
        tasks: indexed by task; their sizes are bytes on the wire.
        dtype: to send; None sends elements as they are.
        workers: N.
        job: its name on the servers.
        streams: of the model's device.
        limit: most bytes of a part.
        optimized: optimizers that servers run; None if they return sums.
    """

    def __init__(
        self,
        gradients: GradientBuffer,
        tasks: Sequence[Task],
        dtype: torch.dtype | None,
        workers: int,
        job: str,
        streams: HostStreams,
        limit: int = MESSAGE,
        optimized: Optimized | None = None,
    ) -> None:
        self._gradients, self._streams = gradients, streams
        self._rounding = Rounding(gradients.flat, dtype) if dtype else None
        self._buffers = []
        for flat in gradients.flat:
            kind = dtype or flat.dtype
            back = flat.dtype if optimized is not None else kind
            direct = flat.device.type == "cpu" and back == flat.dtype
            self._buffers.append(_Buffer(kind, flat if direct else self._empty(len(flat), back)))
        self._free = [self._copies() for _ in range(2)]
        self._sent: dict[int, list[tuple[torch.Tensor, int]]] = {}
        """Pushed copies of each kept round, per flat buffer, and their addresses."""
        self._received = [_bytes_of(buffer.received) for buffer in self._buffers]
        self._width = [buffer.kind.itemsize for buffer in self._buffers]
        whole = [gradients.runs([Piece(task.index, 0, task.size)])[0] for task in tasks]
        self._place = [(run.buffer, run.start) for run in whole]
        declared = tuple(
            Declared(task.name, task.size, dtype_name(self._buffers[run.buffer].kind), task.first_use)
            for task, run in zip(tasks, whole, strict=True)
        )
        self.declaration = Declaration(declared, workers, job, limit, optimized)

    def _empty(self, count: int, kind: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=kind, pin_memory=self._gradients.flat[0].is_cuda)

    def _copies(self) -> list[tuple[torch.Tensor, int]]:
        """Return buffers for the pushes of a round, per flat buffer, and their addresses."""
        made = [self._empty(len(buffer.received), buffer.kind) for buffer in self._buffers]
        return [(tensor, tensor.data_ptr()) for tensor in made]

    def begin(self, step: int, since: int) -> None:
        """Prepare for round ``step``; forget what was pushed before round ``since``."""
        for old in [round_ for round_ in self._sent if round_ < since]:
            self._free.append(self._sent.pop(old))
        self._sent[step] = self._free.pop() if self._free else self._copies()

    def aligned(self, piece: Piece) -> tuple[int, int]:
        """Return the first byte of ``piece`` and the one behind its last; an element belongs where its last byte is."""
        width = self._width[self._place[piece.task][0]]
        return piece.offset // width * width, (piece.offset + piece.size) // width * width

    def fill(self, task: int, start: int, end: int, step: int) -> None:
        """Copy these bytes of a gradient."""
        buffer, base = self._place[task]
        width = self._width[buffer]
        run = BufferSlice(buffer, base + start // width, base + end // width)
        values = self._gradients.slice(run)
        if self._rounding is not None:
            values = self._rounding.round(run, values)
        self._sent[step][buffer][0][run.start : run.end].copy_(values)

    def address(self, task: int, step: int) -> int:
        """Return where the copy of a gradient in round ``step`` is."""
        buffer, base = self._place[task]
        return self._sent[step][buffer][1] + base * self._width[buffer]

    def store(self, task: int, start: int, data: memoryview) -> None:
        """Write arrived bytes to the gradient's place from ``start`` on."""
        buffer, base = self._place[task]
        received, flat = self._buffers[buffer].received, self._gradients.flat[buffer]
        low, width = base + start // self._width[buffer], received.element_size()
        self._received[buffer][low * width : low * width + len(data)] = data
        if received is not flat:
            high = low + len(data) // width
            flat[low:high].copy_(received[low:high], non_blocking=True)

    def places(self) -> Sequence[int] | None:
        """Return the address of each task's sum; None where a sum has to be copied to a device, or widened."""
        for buffer, flat, width in zip(self._buffers, self._gradients.flat, self._width, strict=True):
            if buffer.received is not flat or flat.element_size() != width:
                return None
        return [self._gradients.flat[buffer].data_ptr() + base * self._width[buffer] for buffer, base in self._place]

    @contextmanager
    def sending(self, tasks: Sequence[int]) -> Iterator[None]:
        """Make the device's copies follow the backward pass of ``tasks``."""
        with torch.no_grad(), self._streams.issuing(tasks):
            yield

    @contextmanager
    def arriving(self, task: int) -> Iterator[None]:
        """Mark on the device when the bytes of ``task`` are in their place."""
        with torch.no_grad(), self._streams.arriving():
            yield
            mark = self._streams.arrived()
        self._streams.landed((task,), mark)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor on the host."""
    return tensor.view(torch.uint8).numpy().data
