"""mpi4py as scripts use it that ``mpiexec`` starts for PyTorch: to learn their rank, and to agree on where to meet.

Everything else of MPI is refused, with what to use instead.
"""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch._C._distributed_c10d import Store

from foretrain.live.device import change_after_import, put


def install(store: Callable[[], Store]) -> None:
    """Put a simulated ``COMM_WORLD`` in place of the one of mpi4py, if it is imported.

    Args:
        store: makes the store that live ranks share.
    """

    def change(module: ModuleType) -> None:
        put(module, COMM_WORLD=SimulatedWorld(store))

    change_after_import({"mpi4py.MPI": change})


class SimulatedWorld:
    """All ranks of the job; objects come from live ranks only.

    Attributes:
        rank: this rank's number.
        size: of the world.
    """

    def __init__(self, store: Callable[[], Store]) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._store, self._calls = store, itertools.count()
        self._shared: Store | None = None

    def Get_rank(self) -> int:  # noqa: N802
        """Return this rank's number."""
        return self.rank

    def Get_size(self) -> int:  # noqa: N802
        """Return the number of ranks."""
        return self.size

    def bcast(self, obj: Any = None, root: int = 0) -> Any:
        """Return the root's object."""
        if self._shared is None:
            self._shared = self._store()
        key = f"mpi4py/{next(self._calls)}"
        if self.rank == root:
            self._shared.set(key, pickle.dumps(obj))  # pyright: ignore[reportArgumentType], which takes bytes
            return obj
        return pickle.loads(self._shared.get(key))

    def barrier(self) -> None:
        """Wait for nobody: the host's work takes no time."""

    Barrier = barrier

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotImplementedError(
            f"MPI.COMM_WORLD.{name} is not simulated, only rank, size, bcast and barrier; send by"
            " torch.distributed what GPUs exchange"
        )
