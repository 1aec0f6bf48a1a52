"""Sums of what workers have pushed, added in the order of their ranks.

Floating-point addition is not associative. Contributions are therefore kept in the frames they arrived in, and added
when all are there, always in the same order: two runs give the same bits, as does a restarted server. It costs no more
than adding each on arrival, which would begin with a copy of the first. Sixteen-bit numbers are added in float32 and
rounded once, to nearest, ties to even.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretrain.comm.ps.placement import WIDTHS, Dtype
from foretrain.comm.ps.server.coverage import Coverage

_BLOCK: Final = 32 << 10
"""Elements to add at a time: sum and summands stay in a core's cache for any number of workers."""
_RAW: Final[dict[Dtype, Any]] = {
    "float32": np.float32,
    "float64": np.float64,
    "float16": np.uint16,
    "bfloat16": np.uint16,
}
"""Types of the arrays; the bits of 16-bit numbers are integers."""

Array = NDArray[Any]


class Pushed(NamedTuple):
    """Bytes from ``offset`` on, as a worker has pushed them."""

    offset: int
    data: memoryview

    @property
    def end(self) -> int:
        """Return the offset behind the last byte."""
        return self.offset + len(self.data)


def add_up(
    contributions: Sequence[Sequence[Pushed]], start: int, end: int, dtype: Dtype, out: memoryview, scale: float = 1.0
) -> bool:
    """Write ``scale`` times the sum of bytes ``[start, end)`` into the same place of ``out``, the whole part.

    ``contributions`` are by rank, and zero where a rank has none of these bytes. Return False if no rank has any.
    """
    present = [piece for pushed in contributions if (piece := _within(pushed, start, end))]
    if not present:
        return False
    arrays = [_array_of(piece, start, end, dtype) for piece in present]
    total = _array(out[start:end], dtype)
    for low in range(0, len(total), _BLOCK):
        block = slice(low, low + _BLOCK)
        _add_block([array[block] for array in arrays], total[block], dtype, scale)
    return True


def _add_block(arrays: Sequence[Array], total: Array, dtype: Dtype, scale: float) -> None:
    if WIDTHS[dtype] == 2:
        wide = widened(arrays[0], dtype)
        for other in arrays[1:]:
            wide += widened(other, dtype)
        if scale != 1.0:
            wide *= np.float32(scale)
        narrow(wide, dtype, total)
        return
    first, *others = arrays
    if others:
        np.add(first, others[0], out=total)
    else:
        total[:] = first
    for other in others[1:]:
        np.add(total, other, out=total)
    if scale != 1.0:
        np.multiply(total, total.dtype.type(scale), out=total)


def widened(values: Array, dtype: Dtype) -> NDArray[np.float32]:
    """Return ``values``, the bits of 16-bit numbers, as float32: exact."""
    from foretrain.comm.ps.server import float16 as halves

    wide = np.empty(len(values), np.float32)
    (halves.widen_float16 if dtype == "float16" else halves.widen_bfloat16)(values, wide)
    return wide


def narrow(values: NDArray[np.float32], dtype: Dtype, out: Array) -> None:
    """Round ``values``, which are overwritten, to the bits of 16-bit numbers."""
    from foretrain.comm.ps.server import float16 as halves

    (halves.narrow_float16 if dtype == "float16" else halves.narrow_bfloat16)(values, out)


def _within(pushed: Sequence[Pushed], start: int, end: int) -> list[Pushed]:
    """Return the pieces of ``pushed`` in ``[start, end)``, cut to it."""
    found = []
    for each in pushed:
        offset, data = each
        last = offset + len(data)
        if start <= offset and last <= end:
            found.append(each)
        elif offset < end and start < last:
            low, high = max(start, offset), min(end, last)
            found.append(Pushed(low, data[low - offset : high - offset]))
    return found


def _array_of(pieces: Sequence[Pushed], start: int, end: int, dtype: Dtype) -> Array:
    """Return the concatenated pieces, with zeros in gaps; a single piece is not copied."""
    if len(pieces[0].data) == end - start:
        return _array(pieces[0].data, dtype)
    whole = np.zeros((end - start) // WIDTHS[dtype], _RAW[dtype])
    for piece in pieces:
        at = (piece.offset - start) // WIDTHS[dtype]
        whole[at : at + len(piece.data) // WIDTHS[dtype]] = _array(piece.data, dtype)
    return whole


def _array(data: memoryview, dtype: Dtype) -> Array:
    return np.frombuffer(data, _RAW[dtype])


class PendingUpdate:
    """Gradients for the next update of a part of ``size`` bytes from the workers in the bit mask ``group``."""

    def __init__(self, size: int, group: int) -> None:
        self._size, self._coverage = size, Coverage(size, group)
        self._pushed: dict[int, list[Pushed]] = {}

    def add(self, worker: int, start: int, end: int, data: memoryview | None) -> None:
        """Add ``[start, end)`` of ``worker``; bytes that it has pushed before count once."""
        new, _ = self._coverage.add(worker, start, end)
        if data is not None:
            pieces = self._pushed.setdefault(worker, [])
            pieces += [Pushed(low, data[low - start : high - start]) for low, high in new]

    def remove_worker(self, worker: int) -> None:
        """Remove ``worker``, which is lost, and everything that it has pushed."""
        self._coverage.remove_worker(worker)
        self._pushed.pop(worker, None)

    @property
    def whole(self) -> bool:
        """Return whether all bytes of all workers have arrived."""
        return self._coverage.whole

    def missing(self) -> dict[int, int]:
        """Return the bytes that each worker has yet to push, if any."""
        return self._coverage.missing()

    def total(self, dtype: Dtype, scale: float, out: memoryview) -> bool:
        """Write the sum, by rank, into ``out``, as long as the part; return False if no worker had a gradient."""
        by_rank: Sequence[list[Pushed]] = [self._pushed[worker] for worker in sorted(self._pushed)]
        return add_up(by_rank, 0, self._size, dtype, out, scale)
