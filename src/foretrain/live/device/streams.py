"""``torch.cuda.Stream``, ``Event`` and ``CUDAGraph`` on the simulated device.

A build without CUDA has only placeholders for them. The device's own guard serves PyTorch's generic ``torch.Stream``
and ``torch.Event``, so these are those, with the names and habits of the CUDA ones.

A CUDA graph launches again what was launched once, at the cost of one launch. The extension keeps what is captured
(Note [CUDA graphs] in ``native/log.hpp``); the Python around it is PyTorch's own. Departs from CUDA in that a graph's
tensors come from the common pool of memory.

# Note [Steps in graphs]
An optimizer's step in a graph is made when the graph is replayed, as often as that is; capturing it makes none. It ends
where the graph ends. So several steps of one optimizer in one graph cannot be told apart, and are one.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.cuda.graphs
import torch.cuda.streams

from foretrain.live.device import put


def install(extension: ModuleType) -> None:
    """Install the classes in place of the placeholders, and the functions that return streams."""

    def index(of: Any = None) -> int:
        torch.cuda.init()
        if of is None:
            return extension.current_device()
        number = of if isinstance(of, int) else torch.device(of).index
        return extension.current_device() if number is None or number < 0 else number

    def existing(number: int, of: int) -> Stream:
        return Stream(stream_id=number, device_index=of, device_type=1)

    class Stream(torch.Stream):
        """A CUDA stream in virtual time."""

        def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Stream:
            if "stream_id" in given:
                names = ("stream_id", "device_index", "device_type")
                return super().__new__(cls, **{name: given[name] for name in names})
            return super().__new__(cls, device=torch.device("cuda", index(device)), priority=priority)

        def wait_event(self, event: torch.Event) -> None:
            event.wait(self)

        def wait_stream(self, stream: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            self.wait_event(stream.record_event())

        def record_event(self, event: torch.Event | None = None) -> torch.Event:
            event = Event() if event is None else event
            event.record(self)
            return event

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

        @property
        def _as_parameter_(self) -> ctypes.c_void_p:
            return ctypes.c_void_p(self.stream_id)

        @property
        def priority(self) -> int:
            return 0

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -5

        def __enter__(self) -> Stream:
            before = extension.current_device(), extension.current_stream(self.device_index)
            self._before = [*getattr(self, "_before", ()), before]
            extension.set_device(self.device_index)
            extension.set_stream(self.stream_id, self.device_index)
            return self

        def __exit__(self, *_: object) -> None:
            where, stream = self._before.pop()
            extension.set_stream(stream, self.device_index)
            extension.set_device(where)

        def __hash__(self) -> int:
            return hash((self.stream_id, self.device_index))

    class ExternalStream(Stream):
        """Stream of another library, of which there are none here."""

        def __new__(cls, stream_ptr: int, device: Any = None) -> Any:
            return super().__new__(cls, stream_id=stream_ptr, device_index=index(device), device_type=1)

    class Event(torch.Event):
        """CUDA event in virtual time; all have a time, but only those made for timing report it."""

        _timed: bool

        def __new__(
            cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any
        ) -> Event:
            where = torch.device("cuda", extension.current_device())
            self = super().__new__(cls, where, enable_timing=True, blocking=blocking, interprocess=False)
            self._timed = enable_timing
            return self

        def record(self, stream: torch.Stream | None = None) -> None:
            super().record(current_stream() if stream is None else stream)

        def wait(self, stream: torch.Stream | None = None) -> None:
            super().wait(current_stream() if stream is None else stream)

        def elapsed_time(self, end_event: Any) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
            """Return ms from this event to ``end_event``; ValueError unless both were made with ``enable_timing``."""
            if not (self._timed and getattr(end_event, "_timed", True)):
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            return extension.elapsed(self.event_id, end_event.event_id)

        @property
        def cuda_event(self) -> int:
            return self.event_id

    def current_stream(device: Any = None) -> Stream:
        where = index(device)
        return existing(extension.current_stream(where), where)

    def default_stream(device: Any = None) -> Stream:
        return existing(0, index(device))

    def set_stream(stream: Stream | None) -> None:
        if stream is not None:
            extension.set_device(stream.device_index)
            extension.set_stream(stream.stream_id, stream.device_index)

    for module in (torch.cuda, torch.cuda.streams):
        for one in (Stream, ExternalStream, Event):
            one.__module__ = "torch.cuda.streams"
            put(module, **{one.__name__: one})
    put(torch.cuda, current_stream=current_stream, default_stream=default_stream, set_stream=set_stream)


_after_replay: dict[object, Callable[[], None]] = {}
"""Calls after each replay of the graph that is being captured, by the object they are for."""


def after_replays(what: object, call: Callable[[], None]) -> bool:
    """Make the graph that is being captured call ``call`` after each replay, once for ``what``.

    Returns False if it already does; see Note [Steps in graphs].
    """
    return _after_replay.setdefault(what, call) is call


def install_graphs(device: ModuleType) -> None:
    """Put a class in place of the placeholder that ``torch.cuda.CUDAGraph`` derives from."""
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
            """Take no virtual time."""

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
            """Do nothing: random numbers are not drawn."""

        def enable_debug_mode(self) -> None:
            """Do nothing: there is nothing to dump."""

        def debug_dump(self, debug_path: str) -> None:
            """Do nothing: there is nothing to dump."""

    if torch.version.cuda:  # which derives from a class in C++
        for module in (torch.cuda, torch.cuda.graphs):
            put(module, CUDAGraph=Graph)
    else:
        torch.cuda.graphs.CUDAGraph.__bases__ = (Graph,)
    put(torch._C, _CUDAGraph=Graph, _graph_pool_handle=pool_handle)
    put(torch.cuda.graphs, _cuda_isCurrentStreamCapturing=device.capturing, _graph_pool_handle=pool_handle)
