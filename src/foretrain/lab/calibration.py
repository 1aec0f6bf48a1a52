"""Cost of an exchange between the lab's hosts: measured over sizes, fitted to max(floor, θ + κ·s).

`calibrate` times all-reduces, `probe` rounds through parameter servers and the CPU time of their messages. Operations
follow each other closely, several in flight, as under a schedule that keeps a link busy; the additional time of one
alone is latency, which the others hide.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING

from foretrain.errors import ConfigError
from foretrain.lab.host import cpu_time
from foretrain.lab.messages import CalibrationSample
from foretrain.network import Cluster
from foretrain.network.host_cpu import CpuCost, HostCpu
from foretrain.units import COST_SHIFT, MICROSECOND, MILLISECOND, NANOSECOND, SECOND, Time

if TYPE_CHECKING:
    import torch

    from foretrain.comm.ps.client.connection import Links

SIZES = tuple(1 << power for power in (14, 16, 18, 20, 22, 24))
"""16 KiB to 16 MiB: from operations that cost more than their bytes to DDP's buckets."""
_FEW, _MANY = 3, 24
_TURNS = 3
_LEAST_LATENCY: Time = MICROSECOND


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted cost: θ (ps), κ (ps per byte), the latency of one operation (ps) and its minimum time (ps)."""

    overhead: float
    per_byte: float
    latency: float
    floor: float = 0.0

    def time(self, size: int) -> float:
        """Return the time for which an operation of ``size`` bytes occupies the link, ps."""
        return max(self.floor, self.overhead + self.per_byte * size)

    def on(self, links: Cluster) -> Cluster:
        """Return ``links`` with the rate and costs at which an exchange over them costs this fit."""
        called = replace(links, latency=1, overhead=0, floor=0).cost
        operated = replace(links, latency=0, overhead=1, floor=1).cost
        return replace(
            links.scaled(nominal(links) / self.per_byte),
            latency=max(_LEAST_LATENCY, round(self.latency / called.latency)),
            overhead=round(self.overhead / operated.overhead),
            floor=round(self.floor / operated.floor),
        )


def fit(samples: Iterable[CalibrationSample], fastest: float = 0.0) -> Fit:
    """Return the costs with the least sum of absolute *relative* errors, which no outlier and no single size dominates.

    θ is at least 0 and κ at least ``fastest``, ps per byte: no link is faster than its nominal rate. The best line runs
    through two of the points, or through one and along a limit, and the best floor through one: all are tried.

    Raises ConfigError for fewer than two sizes.
    """
    samples = tuple(samples)
    points = [(sample.size, sample.time) for sample in _deepest(samples)]
    if len({size for size, _ in points}) < 2:
        raise ConfigError("samples", len(points), "are too few to fit a cost", "measure at least two sizes")
    lines = [(0.0, max(fastest, taken / size)) for size, taken in points]
    lines += [(taken - fastest * size, fastest) for size, taken in points if fastest]
    for (size, taken), (other, longer) in combinations(points, 2):
        if size != other:
            slope = (longer - taken) / (other - size)
            lines.append((taken - slope * size, slope))
    latency = _latency(samples)
    found = [
        Fit(overhead, per_byte, latency, floor)
        for overhead, per_byte in lines
        if overhead >= 0 and per_byte >= fastest and per_byte > 0
        for floor in (0.0, *(float(taken) for _, taken in points))
    ]
    return min(found, key=lambda one: (sum(abs(one.time(size) / taken - 1) for size, taken in points), one.floor))


def _deepest(samples: Sequence[CalibrationSample]) -> list[CalibrationSample]:
    """Return the samples of each size that had the most operations in flight."""
    deepest: dict[int, int] = {}
    for sample in samples:
        deepest[sample.size] = max(sample.depth, deepest.get(sample.size, 0))
    return [sample for sample in samples if sample.depth == deepest[sample.size]]


def _latency(samples: Sequence[CalibrationSample]) -> float:
    """Return the additional time of one operation alone over each of several, by the median over sizes."""
    alone = {sample.size: sample.time for sample in samples if sample.depth == 1}
    many = {sample.size: sample.time for sample in _deepest(samples)}
    return max(0.0, median(alone[size] - many[size] for size in many if size in alone)) if alone else 0.0


def with_cpu(links: Cluster, samples: Sequence[CalibrationSample], cores: int) -> Cluster:
    """Return ``links`` between hosts that share ``cores``, with the CPU time of a message from ``samples``.

    What a message costs whatever its size is that of the smallest one alone: between paced bytes a real message seldom
    shares a wake-up with others. Its CPU time is part of the latency that was measured, and is taken out of it.
    ``links`` are returned as they are where no CPU time was counted.
    """
    small = min(samples, key=lambda sample: (sample.size, sample.depth))
    large = max(samples, key=lambda sample: sample.size)
    if not small.worker + small.server:
        return links

    def cost(least: Time, most: Time) -> CpuCost:
        per_byte = max(0.0, (most - least) / (large.size - small.size))
        return CpuCost(max(0, round(least - per_byte * small.size)), round(per_byte * (1 << COST_SHIFT)))

    cpu = HostCpu(cores, cost(small.worker, large.worker), cost(small.server, large.server), together=True)
    # Each way a message is handled at both ends, those of all workers at once.
    handled = (small.worker + small.server) * max(links.workers, cores) // cores
    return replace(links, cpu=cpu, latency=max(_LEAST_LATENCY, links.latency - handled))


def nominal(links: Cluster) -> float:
    """Return the time per byte of an exchange at the nominal rate of ``links``, ps."""
    return links.cost.per_byte / (1 << COST_SHIFT)


def calibrate(
    hosts: int,
    rate: float,
    *,
    sizes: Sequence[int] = SIZES,
    depths: Sequence[int] = (1, 2),
    budget: float = 4.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[CalibrationSample, ...]:
    """Time all-reduces of the default process group; every rank calls it and gets its own times.

    Args:
        hosts: how many ranks.
        rate: nominal, bytes/s; determines the repetitions, alike on every rank.
        sizes: bytes.
        depths: numbers of operations in flight.
        budget: seconds for everything, about.
        progress: called with the number of cases done and of all cases.
    """
    import torch

    tensor = torch.zeros(max(sizes) // 4)

    def measure(size: int, depth: int, seconds: float) -> tuple[Time]:
        expected = 2 * (hosts - 1) / hosts * size / rate + (hosts - 1) * MILLISECOND / SECOND
        return (_timed(tensor[: size // 4], min(_MANY, max(_FEW, math.floor(seconds / expected))), depth),)

    return _in_turns([(size, depth) for size in sizes for depth in depths], measure, budget, progress)


def _in_turns(
    cases: list[tuple[int, int]],
    measure: Callable[[int, int, float], tuple[Time, ...]],
    budget: float,
    progress: Callable[[int, int], None],
) -> tuple[CalibrationSample, ...]:
    """Return the medians of several measurements of each size and depth, in the order of a sample's times.

    Cases take turns, so that a disturbance hits several of them once and none of them always.
    """
    found: dict[tuple[int, int], list[tuple[Time, ...]]] = {case: [] for case in cases}
    total = _TURNS * len(cases)
    for done, case in enumerate(cases * _TURNS, 1):
        found[case].append(measure(*case, budget / total))
        progress(done, total)
    return tuple(
        CalibrationSample(*case, *(round(median(times)) for times in zip(*measured, strict=True)))
        for case, measured in found.items()
    )


def _timed(tensor: torch.Tensor, count: int, depth: int) -> Time:
    """Return the mean time of ``count`` all-reduces of ``tensor``, ``depth`` in flight; the first ``depth`` warm up."""
    import torch.distributed as dist

    # Each operation in flight has a tensor of its own: gloo would let two write into one at once.
    tensors = [tensor, *(tensor.clone() for _ in range(depth - 1))]
    dist.barrier()
    in_flight = [dist.all_reduce(tensors[index], async_op=True) for index in range(depth)]
    began = 0
    for index in range(count + depth):
        work = in_flight.pop(0)
        assert work is not None
        work.wait()
        if index == depth - 1:
            began = time.perf_counter_ns()
        if index < count:
            in_flight.append(dist.all_reduce(tensors[index % depth], async_op=True))
    return (time.perf_counter_ns() - began) * 1000 // count


PUSH_SIZES = tuple(1 << power for power in (12, 14, 16, 18, 20))
"""4 KiB to 1 MiB, the largest message with a sum."""
_LEAST_ROUNDS, _MOST_ROUNDS = 8, 64
_LINGER = 2.0


def probe(
    links: Links,
    nominal_links: Cluster,
    job: str,
    *,
    timeout: float,
    processes: tuple[Sequence[int], Sequence[int]] = ((), ()),
    sizes: Sequence[int] = PUSH_SIZES,
    budget: float = 4.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[CalibrationSample, ...]:
    """Time rounds through the servers; every worker calls it and gets its own times.

    All workers push a message of each size at once and pull its sum, with several in flight so that both directions of
    every link are busy. The smallest size is timed alone, too: its additional time is latency.

    Args:
        links: to every server; this function closes them.
        nominal_links: the links at their nominal rate; determine the repetitions, alike on every worker.
        job: name of the job, the same on all workers.
        timeout: seconds after which an outstanding round counts as stuck.
        processes: pids of the workers and of the servers, to count the CPU time of a message.
        sizes: bytes, ascending.
        budget: seconds for everything, about.
        progress: called with the number of cases done and of all cases.
    """
    from foretrain.comm.ps.client.probing import PushProbe
    from foretrain.comm.ps.client.probing import depth as probe_depth
    from foretrain.comm.ps.frames import FrameKind, Header

    def measure(size: int, depth: int, seconds: float) -> tuple[Time, Time, Time]:
        expected = (nominal(nominal_links) * size + MILLISECOND) / SECOND
        least = max(_LEAST_ROUNDS, 2 * depth)
        count = max(least, min(_MOST_ROUNDS, math.floor(seconds / expected)))
        before = [cpu_time(pids) for pids in processes]
        taken = rounds.series(size, count, depth)
        # Each worker pushes one message in a round and pulls another; a worker and a server are the ends of both.
        messages = 2 * nominal_links.workers * (count + depth)
        worker, server = ((cpu_time(pids) - then) // messages for pids, then in zip(processes, before, strict=True))
        return round(taken * NANOSECOND), worker, server

    # Every server has as many in flight as one alone would.
    servers = len(links.connections)
    cases = [(sizes[0], 1), *((size, servers * probe_depth(size)) for size in sizes)]
    try:
        links.establish(timeout)
        rounds = PushProbe(links, nominal_links.workers, job, 0, timeout)
        rounds.series(sizes[-1], _LEAST_ROUNDS, cases[-1][1])
        samples = _in_turns(cases, measure, budget, progress)
        for connection in links.connections:
            connection.send(Header(FrameKind.BYE))
    finally:
        links.close(_LINGER)
    return samples
