"""Measurement of operators in turns, each once in every round, so that disturbances of the machine affect all alike.

Turns have another reason on a CPU. There an operator that repeats finds its arguments in the nearest cache; in turns it
finds them where those of a training step are, in what other operators have left of the caches. On a GPU, where a step's
tensors are far larger than its cache, calls go round in copies of their arguments that the cache does not hold. Timers
leave out what the measurement itself takes.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, pstdev
from typing import NamedTuple, Protocol

import torch

from foretrain.device.calibration import MeasuredCall, OperatorTime
from foretrain.device.calls import OperatorCall
from foretrain.operator_benchmark.grid import OperatorProbe
from foretrain.operator_benchmark.replay import OperatorReplay, Unrepeatable, replay
from foretrain.units import SECOND, Time

_SPIN = 10_000_000
"""Cycles that a GPU is kept busy, 5 to 8 ms, while the host queues what is timed."""
_FILLED = 4e-3
"""Seconds that queueing may take within that."""
_LONG = 0.02
"""Seconds of calls timed at once beyond which more would tell no more."""
_MOST = 20


class OperatorTimer(Protocol):
    """Timer of calls on one kind of device."""

    def seconds(self, run: Callable[[], object], count: int) -> float:
        """Return the seconds that each of ``count`` consecutive calls takes."""
        ...

    def repeats(self, run: Callable[[], object]) -> int:
        """Return how many calls to time at once."""
        ...


class CpuStopwatch:
    """Timer on the CPU: single calls by the performance counter, which costs 0.1 us."""

    def seconds(self, run: Callable[[], object], count: int) -> float:
        """Return the seconds of each of ``count`` consecutive calls."""
        began = time.perf_counter()
        for _ in range(count):
            run()
        return (time.perf_counter() - began) / count

    def repeats(self, run: Callable[[], object]) -> int:
        """Return 1, so that a call finds its arguments where a program would: out of the nearest cache."""
        return 1


class CudaOperatorTimer:
    """Timer on a GPU: between two events, queued behind a kernel that spins, so that no launch is waited for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def seconds(self, run: Callable[[], object], count: int) -> float:
        """Return the seconds of each of ``count`` consecutive calls."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            torch.cuda._sleep(_SPIN)
            self._begin.record()
            for _ in range(count):
                run()
            self._end.record()
            self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1e3 / count

    def repeats(self, run: Callable[[], object]) -> int:
        """Return as many calls as the host queues while the GPU spins; 1 for those that are long or synchronize."""
        torch.cuda.synchronize(self._device)
        began = time.perf_counter()
        run()
        queued = time.perf_counter() - began
        torch.cuda.synchronize(self._device)
        took = time.perf_counter() - began
        return max(1, min(_MOST, int(_FILLED / max(queued, 1e-6)), int(_LONG / max(took, 1e-6))))


def stopwatch(device: torch.device) -> OperatorTimer:
    """Return the stopwatch of ``device``."""
    return CudaOperatorTimer(device) if device.type == "cuda" else CpuStopwatch()


Progress = Callable[[int, int], None]
Run = Callable[[], object]

_WARMUP = 2
_CACHES = 2
"""Size of the copies of an operator's arguments together, as a multiple of the GPU's cache."""


class Timing(NamedTuple):
    """Seconds, and the relative standard deviation of the middle half of the repetitions."""

    seconds: float
    spread: float

    @property
    def time(self) -> Time:
        """Return picoseconds, at least one."""
        return max(1, round(self.seconds * SECOND))


class MeasuredOperators(NamedTuple):
    """Measured operators, and the calls that could not be repeated, with the reason."""

    calls: tuple[MeasuredCall, ...]
    failed: tuple[tuple[OperatorCall, str], ...]


@dataclass(frozen=True, slots=True)
class MeasuringSession:
    """Settings and state of one measuring session.

    Attributes:
        device: on what.
        rounds: how often each operator is measured.
        budget: bytes that the tensors of all operators measured in turns may have; others follow after them.
        shared: more processes compute than there are cores. Then an operator takes its usual time or, rarely, that
            and another's turn, and medians are scaled such that all operators together take what they did on average.
        progress: told how many operators are measured, from 0 on, and of how many.
    """

    device: torch.device
    rounds: int = 25
    budget: int = 2 << 30
    shared: bool = False
    progress: Progress = field(default=lambda done, every: None)

    def calls(self, calls: Sequence[OperatorCall]) -> MeasuredOperators:
        """Measure ``calls``."""
        found: list[MeasuredCall] = []
        failed: list[tuple[OperatorCall, str]] = []
        self.progress(0, len(calls))
        for chunk in self._chunks(calls, failed):
            _, timings = self.timings([one.run for one in chunk])
            found += [
                MeasuredCall(one.call, timing.time, timing.spread) for one, timing in zip(chunk, timings, strict=True)
            ]
            self.progress(len(found) + len(failed), len(calls))
        return MeasuredOperators(tuple(found), tuple(failed))

    def probes(self, probes: Sequence[OperatorProbe]) -> tuple[OperatorTime, ...]:
        """Measure ``probes``; those whose tensors do not fit are left out."""
        found: list[OperatorTime] = []
        self.progress(0, len(probes))
        for number, probe in enumerate(probes):
            if probe.size <= self.budget:
                _, (timing,) = self.timings([probe.make()])
                found.append(OperatorTime(probe.work, timing.time, timing.spread))
            self.progress(number + 1, len(probes))
        return tuple(found)

    def timings(self, runs: Sequence[Run]) -> tuple[float, list[Timing]]:
        """Return the factor on medians and the time of each of ``runs``, measured in turns."""
        watch = stopwatch(self.device)
        counts = [watch.repeats(run) for run in runs]
        taken: list[list[float]] = [[] for _ in runs]
        with torch.no_grad(), _undisturbed():
            for turn in range(_WARMUP + self.rounds):
                seconds = _once(watch, runs, counts)
                if turn >= _WARMUP:
                    for one, all_of_it in zip(seconds, taken, strict=True):
                        all_of_it.append(one)
        return settled(taken, self.shared)

    def _chunks(
        self, calls: Sequence[OperatorCall], failed: list[tuple[OperatorCall, str]]
    ) -> Iterator[list[OperatorReplay]]:
        """Yield replays of as many calls as fit into the budget at once; append the others to ``failed``."""
        chunk: list[OperatorReplay] = []
        size, beyond = 0, self._beyond()
        for call in calls:
            try:
                one = replay(call, self.device, beyond=beyond, most=self.budget)
            except Unrepeatable as error:
                failed.append((call, str(error)))
                continue
            if chunk and size + one.size > self.budget:
                yield chunk
                chunk, size = [], 0
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
            chunk.append(one)
            size += one.size
        if chunk:
            yield chunk

    def _beyond(self) -> int:
        if self.device.type != "cuda":
            return 0
        return _CACHES * torch.cuda.get_device_properties(self.device).L2_cache_size


def measure(device: torch.device, calls: Sequence[OperatorCall], rounds: int = 25) -> MeasuredOperators:
    """Measure ``calls`` on an otherwise idle ``device``."""
    return MeasuringSession(device, rounds).calls(calls)


def settled(taken: Sequence[Sequence[float]], shared: bool) -> tuple[float, list[Timing]]:
    """Return the factor on medians and the medians themselves; where cores are ``shared``, scaled as `MeasuringSession`
    says.

    The factor comes first.
    """
    scale = sum(map(fmean, taken)) / sum(map(median, taken)) if shared and taken else 1.0
    return scale, [Timing(median(one) * scale, _spread(one)) for one in taken]


def _once(watch: OperatorTimer, runs: Sequence[Run], counts: Sequence[int]) -> list[float]:
    return [watch.seconds(run, count) for run, count in zip(runs, counts, strict=True)]


def _spread(values: Sequence[float]) -> float:
    ordered = sorted(values)
    quarter = len(ordered) // 4
    middle = ordered[quarter : len(ordered) - quarter]
    return round(pstdev(middle) / max(median(ordered), 1e-12), 4) if math.isfinite(sum(middle)) else 0.0


class _undisturbed:  # noqa: N801
    """Context without garbage collection and denormal numbers, whose addition is slow on a CPU."""

    def __enter__(self) -> None:
        gc.collect()
        gc.disable()
        torch.set_flush_denormal(True)

    def __exit__(self, *_: object) -> None:
        torch.set_flush_denormal(False)
        gc.enable()
