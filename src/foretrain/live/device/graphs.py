"""CUDA graphs: what was launched once is launched again, at the cost of one launch.

The extension keeps what is captured (Note [CUDA graphs] in ``native/log.hpp``); the Python around it is PyTorch's own.
Departs from CUDA in that a graph's tensors come from the common pool of memory.

# Note [Steps in graphs]
An optimizer's step in a graph is made when the graph is replayed, as often as that is; capturing it makes none. It ends
where the graph ends. So several steps of one optimizer in one graph cannot be told apart, and are one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.cuda.graphs

from foretrain.live.device.patching import put

_after_replay: dict[object, Callable[[], None]] = {}
"""What the graph that is being captured does behind each of its replays, by what it is done for."""


def after_replays(what: object, call: Callable[[], None]) -> bool:
    """Has the graph that is being captured call ``call`` behind each replay, once for ``what``.

    Returns False if it already does; see Note [Steps in graphs].
    """
    return _after_replay.setdefault(what, call) is call


def install_graphs(device: ModuleType) -> None:
    """Puts a class in place of the placeholder that ``torch.cuda.CUDAGraph`` derives from."""
    pools = itertools.count(1)

    def pool_handle() -> tuple[int, int]:
        return 0, next(pools)

    class Graph:
        """``torch._C._CUDAGraph``."""

        def __new__(cls, keep_graph: bool = False) -> Graph:
            return super().__new__(cls)

        def capture_begin(
            self, pool: Any = None, capture_error_mode: str = "global", check_input_liveness: bool = False
        ) -> None:
            self._pool = pool or pool_handle()
            _after_replay.clear()
            device.begin_capture()

        def capture_end(self) -> None:
            self._captured = device.end_capture()
            self._calls = tuple(_after_replay.values())

        def instantiate(self) -> None:
            """Takes no virtual time."""

        def replay(self) -> None:
            if self._captured is None:
                raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
            self._captured.replay()
            for call in self._calls:
                call()

        def reset(self) -> None:
            del self._captured

        def pool(self) -> Any:
            return self._pool

        def register_generator_state(self, generator: torch.Generator) -> None:
            """Random numbers are not drawn."""

        def enable_debug_mode(self) -> None:
            """There is nothing to dump."""

        def debug_dump(self, debug_path: str) -> None:
            """There is nothing to dump."""

    if torch.version.cuda:  # which derives from a class in C++
        for module in (torch.cuda, torch.cuda.graphs):
            put(module, CUDAGraph=Graph)
    else:
        torch.cuda.graphs.CUDAGraph.__bases__ = (Graph,)
    put(torch._C, _CUDAGraph=Graph, _graph_pool_handle=pool_handle)
    put(torch.cuda.graphs, _cuda_isCurrentStreamCapturing=device.capturing, _graph_pool_handle=pool_handle)
