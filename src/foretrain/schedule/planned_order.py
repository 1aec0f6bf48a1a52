"""Chunks in one order that follows from the job alone: for workers that have a scheduler each.

# Note [One order]
A server has the sum of some bytes when the last worker has pushed them. Workers that are some milliseconds apart, and
push whatever is the most urgent at the moment, push different bytes at the same time: each what the other has yet to
push. Until they meet again nothing comes back, and where links are the bottleneck that time is lost. In simulation two
workers that are 3 ms apart lose 8 % of ResNet-50's step so under ByteScheduler, however they are set, and 0.1 % where
both push the same bytes in the same order. So the order is planned: it is what the policy does on a link that is as the
cost model says, with gradients that come when they are expected.

Departing from the order costs more than waiting for it, unless the link would be idle. So a chunk whose turn it is not
is sent only when nothing is under way. A link that is faster than planned idles more often than one that is slower, and
so the plan is for a slightly slower one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import Protocol

from foretrain.engine import Policy
from foretrain.schedule.job import CostModel, Job
from foretrain.schedule.monitor import DRIFT, Arrivals, Monitor
from foretrain.tasks import Action, Chunk, Done, Event, Ready, Start, StepBegin, Wake, WakeAt
from foretrain.units import Time

_MARGIN = 1.1
"""How much slower than expected the link is in the plan."""
_NOTCHES = 4
"""A link that has changed is planned for in steps of the fourth root of 2, so that workers find the same."""
_DONE, _OTHER = 0, 1


class _Warming(Policy, Protocol):
    warmup: int


def rehearse(policy: _Warming, job: Job) -> tuple[Chunk, ...]:
    """Return the chunks that ``policy`` starts in a step, once it is warm, on a link that is as ``job`` says."""
    now: Time = 0
    free: Time = 0
    chunks: list[Chunk] = []
    heap: list[tuple[Time, int, int, Event]] = []
    count = 0

    def post(event: Event) -> None:
        nonlocal free, count
        for action in policy.handle(event, now):
            count += 1
            if type(action) is WakeAt:
                heappush(heap, (max(now, action.time), _OTHER, count, Wake()))
            elif type(action) is Start:
                chunks.append(action.chunk)
                free = max(now, free) + job.cost.time(action.chunk.size)
                heappush(heap, (free + job.cost.delay(action.chunk.size), _DONE, count, Done(action.chunk)))

    for step in range(policy.warmup + 1):
        chunks.clear()
        post(StepBegin(step))
        for task in job.by_release:
            count += 1
            heappush(heap, (now + job.releases[task], _OTHER, count, Ready(task)))
        while heap:
            now, _, _, event = heappop(heap)
            post(event)
    return tuple(chunks)


class PlannedOrder:
    """Starts planned chunks in their order, each when what it sends is ready; see Note [One order].

    The plan is renewed when links or arrivals have changed for good.

    Args:
        job: what is sent.
        plan: returns the chunks of a step of such a job.
        steps: from so many steps' arrivals a change is told.
    """

    def __init__(self, job: Job, plan: Callable[[Job], Sequence[Chunk]], steps: int) -> None:
        self._job, self._plan = job, plan
        self._arrivals = Arrivals(len(job.tasks), steps)
        self._monitor = Monitor(job.cost, 0.5)
        self._first = True
        self._flying = 0
        self._adopt(job.releases)
        self._reset()

    def handle(self, event: Event, now: Time) -> Sequence[Action]:
        """Start the chunks whose turn has come, and another if nothing is under way."""
        if type(event) is StepBegin:
            self._first = True
            return ()
        if type(event) is Done:
            self._monitor.done(now)
            self._flying -= 1
        elif type(event) is Ready:
            if self._first:
                self._begin(now)
            self._arrivals.note(event.task, now)
            for place in self._chunks_of[event.task]:
                self._missing[place] -= 1
        return self._start(now)

    def _begin(self, now: Time) -> None:
        """Begin a step with its first gradient, from which on arrivals count."""
        self._first = False
        self._arrivals.begin(now)
        drifted = self._monitor.drifted(DRIFT)
        if drifted:
            self._monitor.forget(DRIFT)
            self._monitor.settle()
        moved = self._arrivals.complete and self._arrivals.off(self._releases, DRIFT)
        if drifted or moved:
            self._adopt(self._arrivals.medians() if moved else self._releases)
        self._reset()

    def _reset(self) -> None:
        self._missing = list(self._tasks_of)
        self._sent = [False] * len(self._chunks)
        self._next = 0

    def _adopt(self, releases: Sequence[Time]) -> None:
        first = min(releases, default=0)
        self._releases = tuple(release - first for release in releases)
        slower = _MARGIN * 2 ** (round(_NOTCHES * math.log2(self._monitor.usual)) / _NOTCHES)
        cost = _slowed(self._job.cost, slower)
        self._chunks = self._plan(replace(self._job, releases=self._releases, cost=cost, separate=False))
        tasks = [{piece.task for piece in chunk.pieces} for chunk in self._chunks]
        self._tasks_of = [len(each) for each in tasks]
        self._chunks_of: list[list[int]] = [[] for _ in self._job.tasks]
        for place, each in enumerate(tasks):
            for task in each:
                self._chunks_of[task].append(place)

    def _start(self, now: Time) -> list[Action]:
        actions: list[Action] = []
        count = len(self._chunks)
        while self._next < count and (self._sent[self._next] or not self._missing[self._next]):
            if not self._sent[self._next]:
                actions.append(self._send(self._next, now))
            self._next += 1
        if not self._flying:
            ready = (k for k in range(self._next, count) if not self._sent[k] and not self._missing[k])
            if (place := next(ready, None)) is not None:
                actions.append(self._send(place, now))
        return actions

    def _send(self, place: int, now: Time) -> Start:
        chunk = self._chunks[place]
        self._sent[place] = True
        self._flying += 1
        self._monitor.start(now, chunk.size)
        return Start(chunk)


def _slowed(cost: CostModel, factor: float) -> CostModel:
    """Return the cost of a link that is ``factor`` times as slow."""
    slower = {name: round(factor * getattr(cost, name)) for name in ("overhead", "per_byte", "floor")}
    return replace(cost, **slower)
