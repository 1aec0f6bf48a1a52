"""tictac: the order in which parameters are pulled, from the dependency graph (TIC) or with times (TAC).

Source: Hashemi et al., "TicTac: Accelerating Distributed Deep Learning with Communication Scheduling", MLSys'19 §4.
For a transfer r among those outstanding:

    M    its transfer time
    P    Σ time of the computations for which r is the only outstanding input
    M+   the smallest Σ M over the inputs of a computation that waits for r and at least one more
    TAC  A before B iff min(P_B, M_A) < min(P_A, M_B); ties by M+; best first, then recomputed
    TIC  every M is 1 and every computation takes no time: sort by M+.

The paper orders *pulls*. So gradients are pushed (reduce-scattered) as they appear, and when all are aggregated, which
is synchronous training's barrier, parameters are pulled (all-gathered) in that order while the forward pass runs.

Departures: the graph here is the chain of layers, though the functions below take any; and TIC breaks ties of M+, which
the paper leaves open, by the smallest computation that waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import ClassVar

from foretrain.schedule.job import Job, Knob
from foretrain.schedule.window import whole
from foretrain.tasks import Action, Done, Event, Priorities, Ready, Start, StepBegin
from foretrain.units import Time

Computation = tuple[Time, int]
"""Its time, and the transfers it needs directly or through others: a bit mask."""


def tac(transfers: Sequence[Time], computations: Sequence[Computation]) -> tuple[int, ...]:
    """Timing-aware order of ``transfers`` (times M). O(n·(n + computations))."""
    outstanding = (1 << len(transfers)) - 1
    # Per computation: its time, the transfers it still waits for, and how long they take together.
    waits = [(time, mask, sum(transfers[r] for r in _bits(mask))) for time, mask in computations]
    order: list[int] = []
    while outstanding:
        alone, together = _properties(len(transfers), waits, outstanding)
        best = -1
        for r in _bits(outstanding):
            if best < 0 or _precedes(r, best, transfers, alone, together):
                best = r
        order.append(best)
        done = 1 << best
        outstanding &= ~done
        waits = [
            (time, mask & ~done, total - transfers[best]) if mask & done else (time, mask, total)
            for time, mask, total in waits
            if mask != done
        ]
    return tuple(order)


def tic(count: int, computations: Sequence[Computation]) -> tuple[int, ...]:
    """Timing-independent order of ``count`` transfers."""
    waits = [(0, mask, mask.bit_count()) for _, mask in computations]
    _, together = _properties(count, waits, (1 << count) - 1)
    # M+ ties whatever the smallest set contains; among those, what blocks the smallest computation goes first.
    blocks = [min((mask.bit_count() for _, mask, _ in waits if mask >> r & 1), default=count) for r in range(count)]
    return tuple(sorted(range(count), key=lambda r: (together[r], blocks[r], r)))


def chain(job: Job) -> list[Computation]:
    """The forward pass as computations: layer j needs the parameters of layers 0..j."""
    owned = [0] * len(job.forward)
    for task, layer in enumerate(job.layers):
        owned[layer] |= 1 << task
    computations, mask = [], 0
    for time, own in zip(job.forward, owned, strict=True):
        mask |= own
        computations.append((time, mask))
    return computations


def _properties(
    count: int, waits: Sequence[tuple[Time, int, Time]], outstanding: int
) -> tuple[list[Time], list[float]]:
    """P and M+ of every outstanding transfer."""
    alone: list[Time] = [0] * count
    together = [float("inf")] * count
    unset = outstanding
    for time, mask, total in sorted(waits, key=itemgetter(2)):
        if mask & (mask - 1):
            for r in _bits(mask & unset):
                together[r] = total
            unset &= ~mask
        elif mask:
            alone[mask.bit_length() - 1] += time
    return alone, together


def _precedes(a: int, b: int, transfers: Sequence[Time], alone: Sequence[Time], together: Sequence[float]) -> bool:
    left, right = min(alone[b], transfers[a]), min(alone[a], transfers[b])
    return left < right or (left == right and together[a] < together[b])


def _bits(mask: int) -> Iterable[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class _Pulls:
    """Pushes in order of readiness; when all are aggregated, pulls in ``order``."""

    def __init__(self, job: Job, order: Sequence[int]) -> None:
        self._push = [Start(whole("reduce_scatter", job.tasks, [task.index])) for task in job.tasks]
        self._pull = [Start(whole("all_gather", job.tasks, [i])) for i in order]
        self._pushing = 0

    def handle(self, event: Event) -> Sequence[Action]:
        if type(event) is StepBegin:
            self._pushing = len(self._push)
        elif type(event) is Ready:
            return (self._push[event.task],)
        elif type(event) is Done and event.chunk.op == "reduce_scatter":
            self._pushing -= 1
            if not self._pushing:
                return self._pull
        return ()


class Tac:
    """Timing-aware communication scheduling."""

    knobs: ClassVar[tuple[Knob, ...]] = ()
    barrier: bool = False
    warmup: int = 0
    priorities: Priorities

    def __init__(self, job: Job) -> None:
        order = tac([job.cost.time(task.size) for task in job.tasks], chain(job))
        self._pulls = _Pulls(job, order)
        self.priorities = {"all_gather": order}

    def handle(self, event: Event, now: Time) -> Sequence[Action]:
        """Push what is ready; pull in TAC's order."""
        return self._pulls.handle(event)


class Tic:
    """Timing-independent communication scheduling."""

    knobs: ClassVar[tuple[Knob, ...]] = ()
    barrier: bool = False
    warmup: int = 0
    priorities: Priorities

    def __init__(self, job: Job) -> None:
        order = tic(len(job.tasks), chain(job))
        self._pulls = _Pulls(job, order)
        self.priorities = {"all_gather": order}

    def handle(self, event: Event, now: Time) -> Sequence[Action]:
        """Push what is ready; pull in TIC's order."""
        return self._pulls.handle(event)
