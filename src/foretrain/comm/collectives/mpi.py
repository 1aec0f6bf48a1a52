"""Collectives of MPI: all-reduce, reduce-scatter and all-gather of NumPy arrays over mpi4py's nonblocking calls.

The row "MPI" of ByteScheduler's picture (SOSP'19, Fig. 3). Ranks are started by mpirun, which also ends the others when
one fails. MPI has no 16-bit floats: they are summed in single precision and rounded once.

# Note [Order]
MPI begins nonblocking operations in order, but what one writes may be read by another only when it is done. So an
operation on memory of one under way waits for it before it begins, as the all-gather behind a reduce-scatter.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrain.comm.bounded import Hint
from foretrain.comm.buffers import narrow, widen
from foretrain.comm.coordinator.link import LinkError
from foretrain.errors import ConfigError, MissingExtra

_SPINS = 50
"""Looks at an operation without a pause: MPI makes progress while it is looked at."""
_PAUSE = 50e-6
"""Seconds between two later looks."""
_CLOSED = "these collectives are closed"


class MpiWork:
    """Operation of `MpiCollectives`; a `foretrain.comm.collectives.executor.Work`.

    Any thread may wait.

    Args:
        request: of MPI.
        values: the operation's memory.
        finish: copies the result to its place.
        closed: whether the collectives are closed.
    """

    def __init__(self, request: Any, values: NDArray[Any], finish: Callable[[], None], closed: threading.Event) -> None:
        self.values = values
        self._request, self._finish, self._closed = request, finish, closed
        self._lock = threading.Lock()
        self._done = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the operation is done; return False if ``timeout`` seconds have passed before.

        Raises:
            LinkError: MPI reports an error, or these collectives are closed.
        """
        end, looks = (None if timeout is None else time.monotonic() + timeout), 0
        while not self.done():
            if end is not None and time.monotonic() > end:
                return False
            if self._closed.is_set():
                raise LinkError(_CLOSED)
            if (looks := looks + 1) > _SPINS:
                time.sleep(_PAUSE)
        return True

    def done(self) -> bool:
        """Return whether the operation is done, and its result in its place."""
        with self._lock:
            if not self._done:
                try:
                    finished = bool(self._request.Test())
                except Exception as error:  # mpi4py's own, of a module that is imported where MPI is used
                    raise LinkError(f"MPI failed: {error}") from error
                if finished:
                    self._finish()
                    self._done = True
            return self._done


class MpiCollectives:
    """A `foretrain.comm.collectives.executor.Collectives` over a communicator of its own. Collective.

    Args:
        rank: of this process, in the job.
        ranks: N.

    Raises:
        MissingExtra: mpi4py is not installed.
        ConfigError: MPI has other ranks than the job, or takes no calls from several threads.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise MissingExtra("mpi4py", "mpi", "backend='mpi'") from error
        world = MPI.COMM_WORLD
        if (world.rank, world.size) != (rank, ranks):
            problem = f"is rank {world.rank} of {world.size} in MPI, but rank {rank} of {ranks} in the job"
            raise ConfigError("backend", "mpi", problem, "start the ranks with mpirun")
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise ConfigError("backend", "mpi", "needs MPI_THREAD_MULTIPLE, which this MPI lacks", "use backend='ring'")
        self.rank, self.ranks = rank, ranks
        self._mpi, self._world = MPI, world.Dup()
        self._closed = threading.Event()
        self._under_way: list[MpiWork] = []

    def all_reduce(self, values: NDArray[Any], *, bfloat16: bool = False, hint: Hint | None = None) -> MpiWork:
        """Replace ``values`` by their sum over all ranks."""
        self._wait_for(values)
        wide, finish = _summed(values, bfloat16)
        return self._started(values, lambda: self._world.Iallreduce(self._mpi.IN_PLACE, wide), finish)

    def reduce_scatter(self, values: NDArray[Any], *, bfloat16: bool = False, hint: Hint | None = None) -> MpiWork:
        """Replace block ``rank`` of ``values`` by its sum over all ranks; the length is divisible by their number."""
        self._wait_for(values)
        wide, finish = _summed(values, bfloat16)
        count = len(wide) // self.ranks
        block = np.empty(count, wide.dtype)

        def placed() -> None:
            wide[self.rank * count : (self.rank + 1) * count] = block
            finish()

        return self._started(values, lambda: self._world.Ireduce_scatter_block(wide, block), placed)

    def all_gather(self, values: NDArray[Any], *, bfloat16: bool = False, hint: Hint | None = None) -> MpiWork:
        """Replace each block r of ``values`` by that of rank r; the length is divisible by their number."""
        self._wait_for(values)
        raw = values.view(np.uint8)
        return self._started(values, lambda: self._world.Iallgather(self._mpi.IN_PLACE, raw), _nothing)

    def close(self) -> None:
        """Begin nothing more. The communicator stays until MPI ends: freeing it would wait for all ranks."""
        self._closed.set()

    def _started(self, values: NDArray[Any], start: Callable[[], Any], finish: Callable[[], None]) -> MpiWork:
        if self._closed.is_set():
            raise LinkError(_CLOSED)
        work = MpiWork(start(), values, finish, self._closed)
        self._under_way.append(work)
        return work

    def _wait_for(self, values: NDArray[Any]) -> None:
        """Wait for operations under way that write to ``values``; see Note [Order]."""
        for work in self._under_way:
            if np.may_share_memory(work.values, values):
                work.wait()
        self._under_way = [work for work in self._under_way if not work.done()]


def _summed(values: NDArray[Any], bfloat16: bool) -> tuple[NDArray[Any], Callable[[], None]]:
    """Return ``values`` in a type that MPI sums, and what copies the sum back."""
    if bfloat16:
        wide = widen(values)
        return wide, lambda: narrow(wide, values)
    if values.dtype == np.float16:
        wide = values.astype(np.float32)

        def rounded() -> None:
            values[:] = wide

        return wide, rounded
    return values, _nothing


def _nothing() -> None:
    """Do nothing: the result is in its place."""
