"""Counters of each port and class, flow completion times, and traces of queues."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretrain.network.packet import state as c
from foretrain.network.packet.loading import Prepared


@dataclass(frozen=True, slots=True, eq=False)
class PortCounters:
    """Counts of each port and class, int64 (links, 8).

    Attributes:
        packets, bytes: that it sent, with headers; what its wire lost among them.
        drops, dropped_bytes: that found no room, by the class that they were of.
        marks: packets that were told of congestion.
        deepest: the most bytes that ever waited.
        losses: packets that its wire lost.
        cuts: packets that lost their data for lack of room.
    """

    packets: NDArray[np.int64]
    bytes: NDArray[np.int64]
    drops: NDArray[np.int64]
    dropped_bytes: NDArray[np.int64]
    marks: NDArray[np.int64]
    deepest: NDArray[np.int64]
    losses: NDArray[np.int64]
    cuts: NDArray[np.int64]

    @classmethod
    def of(cls, counts: NDArray[np.int64]) -> PortCounters:
        """Return the columns of the kernels' counts, (links, classes, columns)."""
        columns = (c.PACKETS_OUT, c.BYTES_OUT, c.DROPPED, c.DROPPED_BYTES, c.MARKS, c.DEEPEST, c.LOST, c.CUT_DOWN)
        return cls(*(counts[:, :, column] for column in columns))


@dataclass(frozen=True, slots=True)
class Distribution:
    """Distribution of times, ps: mean, quantiles (of n, the ⌈q·n⌉-th smallest) and maximum.

    Attributes:
        mean, median, p95, p99, p999, largest: 0 where there is nothing.
    """

    mean: float
    median: int
    p95: int
    p99: int
    p999: int
    largest: int

    @classmethod
    def of(cls, times: NDArray[np.int64]) -> Distribution:
        """Return the distribution of ``times``."""
        if not len(times):
            return cls(0.0, 0, 0, 0, 0, 0)
        ordered = np.sort(times)
        median, p95, p99, p999 = (int(ordered[max(0, -(-q * len(times) // 1000) - 1)]) for q in (500, 950, 990, 999))
        return cls(float(ordered.mean()), median, p95, p99, p999, int(ordered[-1]))


@dataclass(frozen=True, slots=True, eq=False)
class QueueTrace:
    """Bytes in watched queues over time.

    Attributes:
        time: ps, int64 (samples,), from 0 on in equal steps.
        bytes: int64 (samples, links), in the order in which they were asked for.
    """

    time: NDArray[np.int64]
    bytes: NDArray[np.int64]


def taken(state: c.PacketState) -> NDArray[np.int64]:
    """Return the trace rows that the kernel has written, and make room for new ones."""
    rows = state.trace[: state.memory[c.TRACED]].copy()
    state.memory[c.TRACED] = 0
    return rows


def trace_of(samples: list[NDArray[np.int64]], ready: Prepared) -> QueueTrace:
    """Join all samples; one that is missing, since nothing happened, equals the next one."""
    if not samples:
        return QueueTrace(np.zeros(0, np.int64), np.zeros((0, 0), np.int64))
    rows = np.concatenate(samples)
    numbers = rows[:, 0]
    step = int(ready.state.memory[c.TRACE_EVERY]) << int(ready.state.memory[c.SHIFT])
    everything = np.arange(numbers[-1] + 1) if len(numbers) else np.zeros(0, np.int64)
    return QueueTrace(everything * step, rows[np.searchsorted(numbers, everything), 1:])
