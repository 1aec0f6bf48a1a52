"""Gradients in flat buffers: their layout, which all frameworks share, and buffers of NumPy.

There is one buffer per type and device, in the order of first use, so that a chunk is nearly always one contiguous
slice, reduced in place. Bytes of a task are bytes *on the wire*: with compression fewer than in memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from foretrain.comm.ps.placement import Declaration, Declared, Dtype
from foretrain.errors import ConfigError, unknown
from foretrain.network.switch_cluster import MESSAGE
from foretrain.tasks import Piece, Task

NUMPY_TYPES: dict[Dtype, type[np.generic]] = {
    "float32": np.float32,
    "float64": np.float64,
    "float16": np.float16,
    "bfloat16": np.uint16,  # its bits: NumPy has no such type
}


class BufferSlice(NamedTuple):
    """Elements ``[start, end)`` of flat buffer ``buffer``."""

    buffer: int
    start: int
    end: int


class FlatLayout:
    """Places of tasks in flat buffers.

    Args:
        counts: elements, by task.
        kinds: what elements must have in common to share a buffer, by task.
        widths: bytes per element on the wire, by task.
        order: task indices, first used first; the order in the buffers.

    Attributes:
        lengths: elements of each buffer.
        kinds: of each buffer.
    """

    def __init__(
        self, counts: Sequence[int], kinds: Sequence[Hashable], widths: Sequence[int], order: Sequence[int]
    ) -> None:
        self.lengths: list[int] = []
        self.kinds: list[Any] = []
        self._counts, self._width = list(counts), list(widths)
        self._buffer, self._base = [0] * len(counts), [0] * len(counts)
        for task in order:
            if kinds[task] not in self.kinds:
                self.kinds.append(kinds[task])
                self.lengths.append(0)
            place = self._buffer[task] = self.kinds.index(kinds[task])
            self._base[task] = self.lengths[place]
            self.lengths[place] += counts[task]

    def size(self, task: int) -> int:
        """Return the bytes of ``task`` on the wire."""
        return self._counts[task] * self._width[task]

    def place(self, task: int) -> BufferSlice:
        """Return the elements of ``task``."""
        return BufferSlice(self._buffer[task], self._base[task], self._base[task] + self._counts[task])

    def width(self, run: BufferSlice) -> int:
        """Return the bytes of an element of ``run`` on the wire."""
        return self._width[self._buffer.index(run.buffer)]

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


class HostGradients(FlatLayout):
    """Flat NumPy buffers.

    Args:
        counts: elements, by task.
        dtypes: their types, by task.
        order: task indices, first used first.

    Attributes:
        flat: the buffers, one-dimensional; of bfloat16 the bits.
        views: per task, its elements.
    """

    def __init__(self, counts: Sequence[int], dtypes: Sequence[Dtype], order: Sequence[int]) -> None:
        super().__init__(counts, dtypes, [np.dtype(NUMPY_TYPES[dtype]).itemsize for dtype in dtypes], order)
        self.flat = [np.zeros(n, NUMPY_TYPES[kind]) for n, kind in zip(self.lengths, self.kinds, strict=True)]
        self.views = [self.slice(self.place(task)) for task in range(len(counts))]

    def slice(self, run: BufferSlice) -> NDArray[Any]:
        """Return the elements of ``run``."""
        return self.flat[run.buffer][run.start : run.end]

    def write(self, task: int, values: NDArray[Any], share: float) -> None:
        """Write ``values`` × ``share`` to the place of ``task``."""
        view = self.views[task]
        if share == 1.0:
            view[:] = values
        elif self.kinds[self._buffer[task]] == "bfloat16":
            narrow(widen(values) * np.float32(share), view)
        else:
            np.multiply(values, values.dtype.type(share), out=view)


def elements(buffer: Any, name: str, count: int, dtype: Dtype) -> NDArray[Any]:
    """Return ``count`` elements of a caller's buffer as a flat array that shares its memory.

    Args:
        buffer: a NumPy array, an object of the buffer protocol, or one that NumPy reads through DLPack, on the host.
        name: of the task, for messages.
        count: elements it must have.
        dtype: their type; bfloat16 as any type of two bytes.

    Raises:
        ConfigError: it has another size or type, is not contiguous, or cannot be read.
    """
    kind = np.dtype(NUMPY_TYPES[dtype])
    try:
        found = buffer if isinstance(buffer, np.ndarray) else _imported(buffer)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        remedy = "hand in a NumPy array, a memoryview, or a tensor on the CPU"
        raise ConfigError(name, type(buffer).__name__, f"cannot be read ({error})", remedy) from None
    if not found.flags.c_contiguous:
        raise ConfigError(name, found.shape, "is not contiguous", "hand in numpy.ascontiguousarray(…)")
    flat = found.reshape(-1)
    if flat.dtype != kind and (flat.dtype == np.uint8 or (dtype == "bfloat16" and flat.itemsize == kind.itemsize)):
        flat = flat.view(kind) if flat.nbytes % kind.itemsize == 0 else flat
    if flat.dtype != kind or flat.size != count:
        declared = f"is not what was declared, {count} × {dtype}"
        raise ConfigError(name, f"{flat.size} × {flat.dtype}", declared, "hand in the tensor that was declared")
    return flat


def declared(name: str, size: int, dtype: Dtype) -> tuple[str, int, Dtype]:
    """Return name, number of elements and type of a tensor of ``size`` bytes; ConfigError if they make no sense."""
    if dtype not in get_args(Dtype):
        raise unknown(f"tensors[{name!r}].dtype", dtype, get_args(Dtype))
    width = np.dtype(NUMPY_TYPES[dtype]).itemsize
    if not isinstance(size, int) or size <= 0 or size % width:
        problem = f"bytes are no whole number of elements of {dtype}"
        raise ConfigError(f"tensors[{name!r}].size", size, problem, f"declare a multiple of {width}")
    return name, size // width, dtype


def _imported(buffer: Any) -> NDArray[Any]:
    """Return an array over the memory of ``buffer``."""
    if hasattr(buffer, "__dlpack__"):
        found = np.from_dlpack(buffer)
        # NumPy takes tensors of some frameworks for read-only, which hand out writeable arrays themselves.
        return found if found.flags.writeable or not hasattr(buffer, "numpy") else buffer.numpy()
    return np.frombuffer(buffer, np.uint8) if isinstance(buffer, bytes | bytearray | memoryview) else np.asarray(buffer)


class HostStaging(HostGradients):
    """Flat NumPy buffers with copies of what was pushed to parameter servers.

    A push sends a copy, which is kept for two rounds: a sum overwrites its gradient, and the push may have to be
    repeated after that.

    Args:
        counts, dtypes, order: as of `HostGradients`.
        tasks: indexed by task.
        workers: N.
        job: its name on the servers.
        limit: most bytes of a part.
    """

    def __init__(
        self,
        counts: Sequence[int],
        dtypes: Sequence[Dtype],
        order: Sequence[int],
        tasks: Sequence[Task],
        workers: int,
        job: str,
        limit: int = MESSAGE,
    ) -> None:
        super().__init__(counts, dtypes, order)
        declared = (Declared(t.name, t.size, dtype, t.first_use) for t, dtype in zip(tasks, dtypes, strict=True))
        self.declaration = Declaration(tuple(declared), workers, job, limit)
        self._received = [flat.view(np.uint8).data for flat in self.flat]
        self._sent: dict[int, list[tuple[memoryview, int]]] = {}
        """Pushed copies of each kept round, by buffer, and their addresses."""
        self._free: list[list[tuple[memoryview, int]]] = []

    def begin(self, step: int, since: int) -> None:
        """Prepare for round ``step``; drop copies of rounds before ``since``."""
        for old in [round_ for round_ in self._sent if round_ < since]:
            self._free.append(self._sent.pop(old))
        self._sent[step] = self._free.pop() if self._free else self._copies()

    def _copies(self) -> list[tuple[memoryview, int]]:
        made = [np.empty(len(each), np.uint8) for each in self._received]
        return [(array.data, array.ctypes.data) for array in made]

    def aligned(self, piece: Piece) -> tuple[int, int]:
        """Return the first byte of ``piece`` and the one behind its last; an element belongs where its last byte is."""
        width = self._width[piece.task]
        return piece.offset // width * width, (piece.offset + piece.size) // width * width

    def fill(self, task: int, start: int, end: int, step: int) -> None:
        """Copy these bytes of a gradient."""
        buffer, at = self._buffer[task], self._base[task] * self._width[task]
        self._sent[step][buffer][0][at + start : at + end] = self._received[buffer][at + start : at + end]

    def address(self, task: int, step: int) -> int:
        """Return where the copy of a gradient in round ``step`` is."""
        return self._sent[step][self._buffer[task]][1] + self._base[task] * self._width[task]

    def store(self, task: int, start: int, data: memoryview) -> None:
        """Write arrived bytes to the gradient's place from ``start`` on."""
        at = self._base[task] * self._width[task] + start
        self._received[self._buffer[task]][at : at + len(data)] = data

    def places(self) -> Sequence[int]:
        """Return the address of each task's sum."""
        at = [flat.ctypes.data for flat in self.flat]
        return [at[self._buffer[task]] + base * self._width[task] for task, base in enumerate(self._base)]

    def sending(self, tasks: Sequence[int]) -> AbstractContextManager[object]:
        """Return a context without effect: gradients on the host can be copied at any time."""
        return nullcontext()

    def arriving(self, task: int) -> AbstractContextManager[object]:
        """Return a context without effect."""
        return nullcontext()


class HostRounding:
    """Compression of gradients to half precision, with error feedback; those of 16 bits stay as they are.

    Args:
        counts: elements, by task.
        dtypes: their types, by task.
        compression: what they are sent as, "fp16" or "bf16".
    """

    def __init__(self, counts: Sequence[int], dtypes: Sequence[Dtype], compression: str) -> None:
        self._kinds = [np.dtype(NUMPY_TYPES[dtype]) for dtype in dtypes]
        half: Dtype = "float16" if compression == "fp16" else "bfloat16"
        self.wire: list[Dtype] = [half if np.dtype(NUMPY_TYPES[own]).itemsize > 2 else own for own in dtypes]
        """Type of each task as it is sent."""
        self._brief = compression == "bf16"
        self._residuals = {k: np.zeros(n, self._kinds[k]) for k, n in enumerate(counts) if self._kinds[k].itemsize > 2}

    def round(self, task: int, values: NDArray[Any], share: float) -> NDArray[Any]:
        """Return ``values`` × ``share`` rounded, with the error of the last rounding added."""
        residual = self._residuals[task]
        residual += values * residual.dtype.type(share)
        if self._brief:
            sent = np.empty(len(values), np.uint16)
            narrow(residual.astype(np.float32), sent)
            residual -= widen(sent)
        else:
            with np.errstate(over="ignore"):
                sent = residual.astype(np.float16)
            with np.errstate(invalid="ignore"):
                residual -= sent
        # The receiver must see an overflow, which loss scaling checks for, but it must not be fed back.
        np.nan_to_num(residual, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        return sent

    def restored(self, task: int, sums: NDArray[Any]) -> NDArray[Any]:
        """Return ``sums``, as they came, in the task's own type."""
        return (widen(sums) if self._brief else sums).astype(self._kinds[task])

    def rounds(self, task: int) -> bool:
        """Return whether ``task`` is sent as another type than its own."""
        return task in self._residuals


def widen(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the numbers whose bfloat16 ``bits`` are given."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(values: NDArray[np.float32], out: NDArray[np.uint16]) -> None:
    """Round to bfloat16, to nearest and ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    out[:] = np.where(np.isnan(values), np.uint32(0x7FC0), rounded)
