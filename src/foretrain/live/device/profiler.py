"""``torch.profiler`` in virtual time: functions of the host by the rank's clock, and kernels of the simulated GPU.

# Note [Two observers]
PyTorch's own profiler runs as in a build without CUDA, and takes down names, shapes, stacks and memory, by the real
clock. Beside it the device takes down when the same functions begin and end by the virtual clock, and what is launched
(Note [Profiled functions] in native/profiler.cpp). Both are put together when the profiler stops: its result has the
same interface as PyTorch's, so that tables, schedules and handlers are PyTorch's own. Its events have the methods of
PyTorch's ``_KinetoEvent``.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.autograd.profiler
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

from foretrain.live.device import profiled_trace, put
from foretrain.live.device.profiled_trace import Launched
from foretrain.units import NANOSECOND, Time

_FUNCTIONS = ("cpu_op", "user_annotation")
"""Categories of the functions that both observe."""
_FIRST = 1 << 16
"""Number of the first launch; PyTorch numbers functions from 1."""


class Function(NamedTuple):
    """A function of the host: its thread as PyTorch numbers it, ps of the rank's clock, ns of the real clock.

    Ends are -1 of what had not ended.
    """

    thread: int
    begin: Time
    end: Time
    real_begin: int
    real_end: int


def install(device: ModuleType) -> None:
    """Make PyTorch's profilers report virtual times."""
    module: Any = torch.autograd.profiler
    enable, prepare, disable = module._enable_profiler, module._prepare_profiler, module._disable_profiler
    under_way: list[tuple[Time, set[ProfilerActivity]]] = []

    def supported() -> set[ProfilerActivity]:
        return {ProfilerActivity.CPU, ProfilerActivity.CUDA}

    def _enable_profiler(config: Any, activities: set[ProfilerActivity], *rest: Any, **named: Any) -> None:
        enable(config, _on_the_host(activities), *rest, **named)
        if activities:  # none, where a script only wants its operators to be NVTX ranges
            under_way.append((device.host(), activities))
            device.begin_profile()

    def _prepare_profiler(config: Any, activities: set[ProfilerActivity], *rest: Any, **named: Any) -> None:
        prepare(config, _on_the_host(activities), *rest, **named)

    def _disable_profiler() -> Any:
        if not under_way:
            return disable()
        began, activities = under_way.pop()
        functions, launches = device.end_profile(ProfilerActivity.CUDA in activities)
        launched = list(_named(launches, device.launch()))
        return ProfilerResult(disable(), began, list(itertools.starmap(Function, functions)), launched, activities)

    replaced = {"_enable_profiler": _enable_profiler, "_prepare_profiler": _prepare_profiler}
    put(module, **replaced, _disable_profiler=_disable_profiler, _supported_activities=supported)
    put(torch.autograd, _supported_activities=supported)


def _on_the_host(activities: set[ProfilerActivity]) -> set[ProfilerActivity]:
    """Return the activities for PyTorch's own profiler: the host alone, if anything."""
    return {ProfilerActivity.CPU} if activities else activities


def _named(launches: Iterable[tuple[Any, ...]], cost: Time) -> Iterable[Launched]:
    """Yield launches named as in CUDA's tools; messages that proceed together are one kernel."""
    batch: tuple[int, Time] | None = None
    for number, (name, stream, host, begin, end, size, function) in enumerate(launches, _FIRST):
        if name in ("nccl:send", "nccl:recv"):
            if batch == (stream, end):
                continue
            batch = stream, end
        kind, call, kernel = _titles(name)
        yield Launched(number, kind, call, kernel, stream, host - cost, host, begin, end, size, function)


def _titles(name: str) -> tuple[str, str, str]:
    """Return category, call of CUDA's runtime, and kernel."""
    if name.startswith("nccl:"):
        return "kernel", "cudaLaunchKernelExC", profiled_trace.kernel_of(name.removeprefix("nccl:"))
    if name.startswith(("Memcpy", "Memset")):
        return f"gpu_{name[:6].lower()}", f"cuda{name[:6]}Async", name
    return "kernel", "cudaLaunchKernel", f"{name.removeprefix('aten::')}_kernel"


class ProfilerResult:
    """Result of PyTorch's profiler in virtual time: in place of ``_ProfilerResult``, whose methods it has.

    Args:
        real: PyTorch's result, by the real clock.
        began: when it began, ps.
        functions: the functions of the host, in the order of their beginnings.
        launches: what they launched.
        activities: those to report, of CPU and CUDA.
    """

    def __init__(
        self,
        real: Any,
        began: Time,
        functions: Sequence[Function],
        launches: Sequence[Launched],
        activities: set[ProfilerActivity],
    ) -> None:
        self._real, self._began, self._launches = real, began, launches
        self._hosts = ProfilerActivity.CPU in activities
        found = real.events()
        matched = _matched([one for one in found if one.activity_type() in _FUNCTIONS], functions)
        self._numbers = {index: event.correlation_id() for index, event in matched.items()}
        self._clock = ProfilerClock(began, functions, matched)
        self._events = [HostEvent(event, self._clock) for event in found] if self._hosts else []
        self._events += [KernelEvent(one, self._numbers.get(one.function, 0)) for one in launches]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def events(self) -> list[Any]:
        """Return all events, those of the host first; ns of the rank's clock."""
        return self._events

    def trace_start_ns(self) -> int:
        """Return when the profiler began."""
        return self._began // NANOSECOND

    def save(self, path: str) -> None:
        """Write the trace for Chrome and similar viewers."""
        self._real.save(path)
        file = Path(path)
        text = profiled_trace.virtual(
            file.read_text(encoding="utf-8"), self._clock, self._launches, self._numbers, hosts=self._hosts
        )
        file.write_text(text, encoding="utf-8")


def _matched(events: Sequence[Any], functions: Sequence[Function]) -> dict[int, Any]:
    """Return the profiler's event of each function, by index, on threads where both observed as many."""
    by_thread: dict[int, list[Any]] = {}
    for event in events:
        by_thread.setdefault(event.start_thread_id(), []).append(event)
    indices: dict[int, list[int]] = {}
    for index, function in enumerate(functions):
        indices.setdefault(function.thread, []).append(index)
    matched: dict[int, Any] = {}
    for thread, each in by_thread.items():
        own = indices.get(thread, [])
        if len(own) == len(each):
            each.sort(key=lambda event: (event.start_ns(), -event.end_ns()))
            matched.update(zip(own, each, strict=True))
    return matched


class ProfilerClock:
    """Rank's clock as a function of the real one, both in ns; it steps at the events that both observers have seen.

    Where they differ, e.g. as the script toggled the profiler, the device's own reading of the real clock serves; it is
    within a fraction of a microsecond of the profiler's.
    """

    def __init__(self, began: Time, functions: Sequence[Function], matched: dict[int, Any]) -> None:
        marks: list[tuple[int, Time]] = []
        for index, one in enumerate(functions):
            event = matched.get(index)
            marks.append((event.start_ns() if event else one.real_begin, one.begin))
            if one.end >= 0:
                marks.append((event.end_ns() if event else one.real_end, one.end))
        marks.sort()
        self._began = began // NANOSECOND
        self._real = [real for real, _ in marks]
        self._virtual = [time // NANOSECOND for time in itertools.accumulate((time for _, time in marks), max)]

    def __call__(self, real: int) -> int:
        """Return what the rank's clock showed."""
        last = bisect_right(self._real, real) - 1
        return self._virtual[last] if last >= 0 else self._began


class HostEvent:
    """Event of the host, in virtual time."""

    def __init__(self, event: Any, clock: Callable[[int], int]) -> None:
        self._event = event
        self._start, self._end = clock(event.start_ns()), clock(event.end_ns())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._event, name)

    def start_ns(self) -> int:
        """Return ns since the rank began."""
        return self._start

    def end_ns(self) -> int:
        """Return ns since the rank began."""
        return self._end

    def duration_ns(self) -> int:
        """Return the time from start to end."""
        return self._end - self._start


class KernelEvent:
    """Event of the GPU; ``number`` is that of the function that launched it, 0 if none did."""

    def __init__(self, one: Launched, number: int) -> None:
        stream = one.cuda_stream
        self._values = _HOST_ONLY | {
            "name": one.kernel,
            "activity_type": one.kind,
            "device_index": one.device,
            "device_resource_id": stream,
            "start_thread_id": stream,
            "end_thread_id": stream,
            "start_ns": one.begin // NANOSECOND,
            "end_ns": one.end // NANOSECOND,
            "duration_ns": one.end // NANOSECOND - one.begin // NANOSECOND,
            "correlation_id": one.number,
            "linked_correlation_id": number,
        }

    def __getattr__(self, name: str) -> Callable[[], Any]:
        try:
            value = self._values[name]
        except KeyError:
            raise AttributeError(name) from None
        return lambda: value


_HOST_ONLY: dict[str, Any] = {
    **dict.fromkeys(["external_id", "fwd_thread_id", "scope", "flops", "nbytes", "flow_id", "flow_type"], 0),
    **dict.fromkeys(["sequence_nr", "cuda_elapsed_us", "privateuse1_elapsed_us"], -1),
    **dict.fromkeys(["python_id", "python_parent_id", "python_module_id"], -1),
    **dict.fromkeys(["is_async", "is_user_annotation", "is_python_function", "is_hidden_event", "flow_start"], False),
    **dict.fromkeys(["overload_name", "metadata_json"], ""),
    **{name: [] for name in ["shapes", "dtypes", "concrete_inputs", "stack"]},
    **{name: [] for name in ["structured_input_shapes", "structured_input_strides"]},
    **{name: {} for name in ["kwinputs", "extra_meta", "typed_metadata"]},  # the last since 2.14
    "device_type": DeviceType.CUDA,
}
"""Values of a GPU event's attributes that only events of the host have."""
