"""Traces of queues, from rows that kernels note to columns that people plot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretrain.network.packet import state as c
from foretrain.network.packet.loading import Prepared


@dataclass(frozen=True, slots=True, eq=False)
class QueueTrace:
    """What waited in queues.

    Attributes:
        time: ps, int64 (samples,), from 0 on in equal steps.
        bytes: int64 (samples, links), in the order in which they were asked for.
    """

    time: NDArray[np.int64]
    bytes: NDArray[np.int64]


def taken(state: c.PacketState) -> NDArray[np.int64]:
    """The rows that the kernel has noted since the last time; it has room for new ones."""
    rows = state.trace[: state.memory[c.TRACED]].copy()
    state.memory[c.TRACED] = 0
    return rows


def trace_of(samples: list[NDArray[np.int64]], ready: Prepared) -> QueueTrace:
    """All samples; one that nobody took, since nothing happened, is as the next one."""
    if not samples:
        return QueueTrace(np.zeros(0, np.int64), np.zeros((0, 0), np.int64))
    rows = np.concatenate(samples)
    numbers = rows[:, 0]
    step = int(ready.state.memory[c.TRACE_EVERY]) << int(ready.state.memory[c.SHIFT])
    everything = np.arange(numbers[-1] + 1) if len(numbers) else np.zeros(0, np.int64)
    return QueueTrace(everything * step, rows[np.searchsorted(numbers, everything), 1:])
