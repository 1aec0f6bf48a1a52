"""A network in which nothing is in anybody's way: each flow has its path to itself, at the rate of its slowest link.

What depends on what is kept, and so are latency, steps and releases: the least that a program can take, whatever else
is sent. Where the other fidelities take longer, that is contention.
"""

from __future__ import annotations

import dataclasses
import heapq
import math

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError
from foretrain.network.fluid import run as run_fluid
from foretrain.network.network_simulator import ProgramHandle
from foretrain.network.program import Paths, Program
from foretrain.units import Time


def run(program: Program, capacity: NDArray[np.float64]) -> NDArray[np.float64]:
    """When each flow of ``program`` ends, ps, float64 (flows,).

    Each flow gets a link of its own, as fast as the slowest of its path; ``capacity`` is in bytes/s, (links,).

    Raises:
        StallError: the program can never complete.
    """
    hops = np.diff(program.paths.first)
    slowest = np.full(len(program), np.inf)
    np.minimum.at(slowest, np.repeat(np.arange(len(program)), hops), capacity[program.paths.links])
    crossing = np.flatnonzero(hops > 0)
    first = np.zeros(len(program) + 1, np.int32)
    np.cumsum(hops > 0, out=first[1:])
    private = Paths(first, np.arange(len(crossing), dtype=np.int32))
    return run_fluid(
        dataclasses.replace(program, paths=private, priority=program.priority * 0), slowest[crossing]
    ).finish


class Ideal:
    """The same as a carrier (`foretrain.network.network_simulator.NetworkSimulator`): programs do not meet, so each end
    is known at once.

    Args:
        capacity: bytes/s of each link, float64 (links,).
    """

    def __init__(self, capacity: NDArray[np.float64]) -> None:
        self._capacity = capacity
        self._now: Time = 0
        self._running: dict[int, ProgramHandle] = {}
        self._ends: list[tuple[Time, int]] = []
        self._next = 0

    @property
    def now(self) -> Time:
        """The present, ps."""
        return self._now

    @property
    def running(self) -> tuple[ProgramHandle, ...]:
        """The programs that have not completed, in the order in which they came."""
        return tuple(self._running.values())

    def add(self, program: Program, at: Time | None = None) -> ProgramHandle:
        """Starts ``program`` now, or at ``at``, up to which time then passes first.

        Raises:
            StallError: it can never complete.
        """
        if at is not None:
            self.advance(at)
        handle = ProgramHandle(program, self._now, _index=self._next)
        self._next += 1
        if not len(program):
            handle.end = handle.added
            return handle
        releases = np.maximum(program.release, self._now) - self._now
        handle.finish = run(dataclasses.replace(program, release=releases), self._capacity) + self._now
        self._running[handle._index] = handle
        heapq.heappush(self._ends, (math.ceil(handle.finish.max()), handle._index))
        return handle

    def advance(self, until: Time | None = None, *, stop: bool = False) -> tuple[ProgramHandle, ...]:
        """Lets time pass to ``until``, or until everything is done; returns what completed, in order."""
        if until is not None and until < self._now:
            raise ConfigError("until", until, "is past", f"it is {self._now} ps now")
        if stop and (first := self.next_completion()) is not None and (until is None or first < until):
            until = first
        done: list[ProgramHandle] = []
        while self._ends and (until is None or self._ends[0][0] <= until):
            end, index = heapq.heappop(self._ends)
            if index in self._running:
                handle = self._running.pop(index)
                handle.end = self._now = end
                done.append(handle)
        self._now = self._now if until is None else until
        return tuple(done)

    def predict(self, handle: ProgramHandle) -> Time:
        """When ``handle`` completes, ps."""
        if handle.end is None:
            self._check(handle)
        return math.ceil(handle.finish.max()) if handle.end is None else handle.end

    def next_completion(self) -> Time | None:
        """When the next program completes, ps; None if none runs."""
        while self._ends and self._ends[0][1] not in self._running:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else None

    def cancel(self, handle: ProgramHandle) -> None:
        """Takes ``handle`` out of the network, now."""
        self._check(handle)
        handle.cancelled = True
        del self._running[handle._index]

    def _check(self, handle: ProgramHandle) -> None:
        if self._running.get(handle._index) is not handle:
            state = "was cancelled" if handle.cancelled else "has completed or is of another network"
            raise ConfigError("handle", handle._index, state, "name a program that runs")
