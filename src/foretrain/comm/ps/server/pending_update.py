"""What has come for the next update of a part, until all of it has."""

from __future__ import annotations

from collections.abc import Sequence

from foretrain.comm.ps.placement import Dtype
from foretrain.comm.ps.server.coverage import Coverage
from foretrain.comm.ps.server.sums import Pushed, add_up


class PendingUpdate:
    """Of a part of ``size`` bytes, to which the workers in the bit mask ``group`` push."""

    def __init__(self, size: int, group: int) -> None:
        self._size, self._coverage = size, Coverage(size, group)
        self._pushed: dict[int, list[Pushed]] = {}

    def add(self, worker: int, start: int, end: int, data: memoryview | None) -> None:
        """``worker`` has pushed ``[start, end)``; what it had pushed before counts once."""
        new, _ = self._coverage.add(worker, start, end)
        if data is not None:
            pieces = self._pushed.setdefault(worker, [])
            pieces += [Pushed(low, data[low - start : high - start]) for low, high in new]

    def without(self, worker: int) -> None:
        """``worker`` is lost, and what it has pushed with it."""
        self._coverage.without(worker)
        self._pushed.pop(worker, None)

    @property
    def whole(self) -> bool:
        """Whether all of it has come."""
        return self._coverage.whole

    def missing(self) -> dict[int, int]:
        """Bytes that each worker has yet to push, where there are any."""
        return self._coverage.missing()

    def total(self, dtype: Dtype, scale: float, out: memoryview) -> bool:
        """The sum, by rank, into ``out``, which is as long as the part; False where nobody had a gradient."""
        by_rank: Sequence[list[Pushed]] = [self._pushed[worker] for worker in sorted(self._pushed)]
        return add_up(by_rank, 0, self._size, dtype, out, scale)
