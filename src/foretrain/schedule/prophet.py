"""prophet: predictable blocks, each filled with exactly what the link can drain before the next arrives.

Source: Zhang et al., "Prophet: Speeding up Distributed DNN Training with Predictable Communication Scheduling", ICPP'21
§3–4. Gradients leave the backward pass in steps (blocks), at times that repeat from one iteration to the next:

- *profile*: for some steps, note when each gradient is ready; a block ends where the gap to the next gradient exceeds
  ``factor`` times the mean gap; A_k is the interval from block k to the arrival of the next;
- *backward phase*: when block k is complete, send the longest prefix P of what is ready, the most urgent first, with
  Σ_{j∈P}(s_j/B + θ) ≤ A_k, without a credit window: it has drained before the next, more urgent block arrives,
  so nothing less urgent is ever in its way. What did not fit waits for the next block;
- *forward phase*: when the last block is complete nothing more urgent can come: strict priority under a byte credit.

Departures, each because the simulator shows the gap to T* shrink:

- A_k is a low quantile of the profiled intervals and B of the monitored bandwidth (`foretrain.schedule.monitor`);
  both are renewed when they drift. The published code measures each once.
- the time from a block's first to its last gradient is filled by the same rule, not left idle.
- ``cut`` (1 by default, 0 is the paper): the last partition is cut to what still fits, so that the link does not idle
  for the rest of every interval.
- ``fuse`` (1 by default, 0 is the paper, more fuses more): small gradients share an operation, in the backward phase
  up to a partition, in the forward phase while the data takes less than ``fuse`` × θ, so that nobody waits long.
- ``ahead`` (2 by default, 0 is the paper): what is sent may drain that many start-ups, and the latency, after the
  next block is due. A real operation is handed over, and starts up, before its first byte moves; a link that was empty
  when the next block came idled for as long, at each of some twenty blocks: 5 % of ResNet-50 over 2 Gb/s.
- ``strict`` (1e6 by default, which is the paper; less is laxer): only blocks that come within so many times what a
  full window takes to drain before the end of the backward pass are waited for; until then, as after it, the window
  rules. No layer can begin before the last block has come, so what is in the way of an earlier one delays little, and
  large chunks cost a real link less than many that fit an interval.
- when a block is late, and by a low quantile most are, small chunks are sent until it comes, instead of idling; a whole
  partition would make the block wait.
- ``planned`` (1 by default, 0 is the paper): where each worker has a scheduler of its own, as over a parameter server,
  all push in one order, which is what these rules make of a link and of gradients as they are expected to be. See
  Note [One order].
- every acknowledgement corrects when the link will be free. On a real link, whose bandwidth is a low quantile and so
  nearly always better than promised, the link would else idle for the difference, at each of some twenty blocks: on
  ResNet-50 over 1 Gb/s that was 11 % of the iteration.

# Note [One order]
A server has the sum of some bytes when the last worker has pushed them. Workers that are some milliseconds apart, and
push whatever is the most urgent at the moment, push different bytes at the same time: each what the other has yet to
push. Until they meet again nothing comes back, and where links are the bottleneck that time is lost. Workers that push
the same bytes in the same order lose only by how much the last is late. So the order is planned: it is what the policy
does on a link that is as the cost model says, with gradients that come when they are expected.

Departing from the order costs more than waiting for it, unless the link would be idle. So a chunk whose turn it is not
is sent only when nothing is under way.

A link that workers share with servers on their own hosts carries what the servers send when these have it, and so what
a worker pushes takes longer at times. The plan is for a slightly slower link there: one that is faster than planned
idles, and a slower one does not.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from statistics import median
from typing import ClassVar, Protocol

from foretrain.engine import Policy
from foretrain.schedule.job import CostModel, Job, Knob
from foretrain.schedule.monitor import DRIFT, Arrivals, Blocks, Monitor
from foretrain.schedule.window import Window
from foretrain.tasks import Action, Chunk, Done, Event, Piece, Priorities, Ready, Start, StepBegin, Wake, WakeAt
from foretrain.units import Time

_SHARED = 1.1
"""Factor by which the plan takes a link that workers share with servers to be slower than expected."""
_NOTCHES = 4
"""A link that has changed is planned for in steps of the fourth root of 2, so that workers find the same."""
_STEPS = 3
"""Steps in which the link must be slower, or faster, than planned for."""
_LEAST = 1 / 16
"""Least slowness of a link: 16 times as fast as expected."""
_DONE, _OTHER = 0, 1


class Prophet:
    """Predictable communication scheduling."""

    knobs: ClassVar[tuple[Knob, ...]] = (
        Knob("partition", 4_000_000, 1 << 10, 1 << 34),
        Knob("credit", 16_000_000, 1 << 10, 1 << 34),
        Knob("factor", 2.0, 0.0, 1e6, "factor", exact=True, grid=(0.0, 0.5, 1.0, 2.0, 4.0, 8.0)),
        Knob("quantile", 0.1, 0.0, 1.0, "factor", tunable=False, noisy=True, grid=(0.05, 0.1, 0.25, 0.5)),
        Knob("profile", 3, 1, 1000, "count", tunable=False),
        Knob("cut", 1, 0, 1, "count", tunable=False),
        Knob("fuse", 1.0, 0.0, 1e6, "factor", grid=(0.0, 1.0, 4.0, 16.0, 64.0)),
        Knob("ahead", 2.0, 0.0, 1e6, "factor", tunable=False),
        Knob("strict", 1e6, 0.0, 1e6, "factor", grid=(1.0, 4.0, 1e6)),
        Knob("planned", 1, 0, 1, "count", tunable=False),
    )
    barrier: bool = False
    priorities: Priorities

    def __init__(
        self,
        job: Job,
        *,
        partition: int,
        credit: int,
        factor: float,
        quantile: float,
        profile: int,
        cut: int,
        fuse: float,
        ahead: float,
        strict: float,
        planned: int,
    ) -> None:
        self.priorities = {"all_reduce": job.by_urgency}
        self._planned: PlannedOrder | None = None
        if planned and job.separate:
            knobs = {"partition": partition, "credit": credit, "factor": factor, "quantile": quantile}
            knobs |= {"profile": profile, "cut": cut, "fuse": fuse, "ahead": ahead, "strict": strict, "planned": 0}
            self._planned = PlannedOrder(job, lambda alone: rehearse(Prophet(alone, **knobs), alone))
            self.warmup = 0
            return
        self.warmup = self._profile = profile
        self._job = job
        self._partition, self._credit = partition, credit
        self._factor, self._share = factor, quantile
        self._cut, self._fuse = bool(cut), fuse > 0
        # Below this many bytes an operation costs more than what it carries.
        self._grain = min(partition, job.cost.breakeven)
        self._ahead = int(ahead * job.cost.startup) + (job.cost.latency if ahead else 0)
        # What is sent while a late block may come at any moment: worth its operation, and no more.
        self._quantum = min(partition, max(4 * self._grain, partition // 8)) if cut else partition
        self._enough = min(partition, int(fuse * self._grain))
        self._strict = int(min(strict * job.cost.time(credit), 1 << 62))
        self._strict_from: Time = 0
        self._order = job.by_urgency
        self._profiling = Window(job.tasks, [[i] for i in self._order], partition, credit)
        self._arrivals = Arrivals(len(job.tasks), profile)
        self._monitor = Monitor(job.cost, quantile)
        self._blocks: Blocks | None = None
        self._adopted: list[Time] = []
        self._stale = 0
        self._missing: list[int] = []
        self._coming = 0
        self._queue: list[int] = []
        self._left = [0] * len(job.tasks)
        self._deadline: Time | None = None
        self._under_way = self._flying = self._queued = 0

    def handle(self, event: Event, now: Time) -> Sequence[Action]:
        """Profiles at first; then fills interval after interval. Where an order is planned, follows it."""
        if self._planned is not None:
            return self._planned.handle(event, now)
        if type(event) is StepBegin:
            self._begin(now)
        elif type(event) is Ready:
            self._arrivals.note(event.task, now)
        elif type(event) is Done:
            self._monitor.done(now)
            self._under_way -= event.chunk.size
            self._flying -= 1
        if self._blocks is None:
            starts = self._profiling.handle(event)
            self._send(starts, now)
            return starts
        if type(event) is Ready:
            return self._ready(event.task, now, self._blocks)
        if type(event) is Wake:
            return self._late(now)
        if type(event) is Done:
            return self._advance(now)
        return ()

    def _begin(self, now: Time) -> None:
        self._arrivals.begin(now)
        if self._arrivals.complete:
            self._renew()
        if self._blocks:
            self._missing = list(self._blocks.sizes)
            self._coming = len(self._blocks.of)
            self._strict_from = now + max(self._adopted) - self._strict
        self._deadline = None

    def _renew(self) -> None:
        """Adopt the profile when it is new, when it has drifted, and until no step from before the drift is in it."""
        if self._blocks is not None and self._arrivals.off(self._adopted, DRIFT):
            self._stale = self._profile
        drifted = self._monitor.drifted(DRIFT)
        if drifted:
            self._monitor.forget(DRIFT)
        if self._blocks is None or self._stale or drifted:
            self._blocks = self._arrivals.blocks(self._factor, self._share)
            self._adopted = self._arrivals.medians()
            self._monitor.settle()
            self._stale = max(0, self._stale - 1)

    def _ready(self, task: int, now: Time, found: Blocks) -> Sequence[Action]:
        block = found.of[task]
        heappush(self._queue, self._job.tasks[task].first_use)
        self._left[task] = self._job.tasks[task].size
        self._queued += self._left[task]
        first = self._missing[block] == found.sizes[block]
        self._missing[block] -= 1
        self._coming -= 1
        if not self._missing[block] and block < len(found.intervals):
            self._deadline = now + found.intervals[block]
        elif first:
            self._deadline = now + found.durations[block]
        else:
            return self._advance(now)
        return [WakeAt(self._deadline), *self._advance(now)]

    def _advance(self, now: Time) -> list[Action]:
        """Start what may be under way now."""
        return self._fill(now) if self._coming and now >= self._strict_from else self._window(now)

    def _late(self, now: Time) -> Sequence[Action]:
        """The interval is over. If what should have come by now has not, send a little more and look again."""
        if self._deadline is None or now < self._deadline or not self._coming or not self._queue:
            return ()
        if now < self._strict_from:
            return self._window(now)
        actions: list[Action] = []
        if self._monitor.free_at - self._ahead <= now:
            chunk = self._gather(self._quantum, self._quantum)
            assert chunk is not None
            actions.append(Start(chunk))
            self._send(actions, now)
        self._deadline = max(now + 1, self._monitor.free_at - self._ahead)
        return [*actions, WakeAt(self._deadline)]

    def _fill(self, now: Time) -> list[Action]:
        """Start what drains before the present interval ends."""
        actions: list[Action] = []
        while self._queue and self._deadline is not None and now < self._deadline:
            room = self._deadline + self._ahead - max(now, self._monitor.free_at)
            chunk = self._gather(self._monitor.fits(room), self._partition)
            if chunk is None:
                break
            actions.append(Start(chunk))
            self._send(actions[-1:], now)
        return actions

    def _window(self, now: Time) -> list[Action]:
        """Strict priority while credit lasts. Behind two chunks little is held back, for company may come."""
        actions: list[Action] = []
        while self._queue and self._under_way < self._credit and (self._flying < 2 or self._queued >= self._enough):
            chunk = self._gather(self._partition, self._enough)
            assert chunk is not None
            actions.append(Start(chunk))
            self._send(actions[-1:], now)
        return actions

    def _gather(self, fits: int, enough: int) -> Chunk | None:
        """The most urgent chunk of at most ``fits`` bytes, to which others are fused until there are ``enough``."""
        pieces: list[Piece] = []
        size = 0
        while self._queue and (not pieces or (self._fuse and size < enough)):
            task = self._order[self._queue[0]]
            left = self._left[task]
            take = min(left, self._partition - size)
            if take > fits - size:
                # A cut piece must be worth its operation.
                take = fits - size if self._cut and fits >= self._grain else 0
            if take <= 0:
                break
            pieces.append(Piece(task, self._job.tasks[task].size - left, take))
            self._left[task] = left - take
            size += take
            if take == left:
                heappop(self._queue)
        self._queued -= size
        return Chunk("all_reduce", tuple(pieces), size) if pieces else None

    def _send(self, actions: Sequence[Action], now: Time) -> None:
        for action in actions:
            if type(action) is Start:
                self._monitor.start(now, action.chunk.size)
                self._under_way += action.chunk.size
                self._flying += 1


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

    The order is planned anew when links have changed for good. A host that is held up hears of many chunks at once, so
    only a whole step tells how slow the link is, and only several steps that it has changed.

    Args:
        job: what is sent.
        plan: returns the chunks of a step of such a job.
    """

    def __init__(self, job: Job, plan: Callable[[Job], Sequence[Chunk]]) -> None:
        self._job, self._plan = job, plan
        self._margin = _SHARED if job.beside else 1.0
        self._slowness = 1.0
        """Of the link that is planned for, but for the margin."""
        self._recent: deque[float] = deque(maxlen=_STEPS)
        """Slowness of the link in the latest steps."""
        self._under_way: deque[Time] = deque()
        """Start of each chunk under way."""
        self._heard: Time = 0
        self._took = self._expected = 0
        self._adopt()
        self._reset()

    def handle(self, event: Event, now: Time) -> Sequence[Action]:
        """Start the chunks whose turn has come, and another if nothing is under way."""
        if type(event) is StepBegin:
            self._judge()
            self._reset()
            return ()
        if type(event) is Done:
            self._measure(event.chunk.size, now)
        elif type(event) is Ready:
            for place in self._chunks_of[event.task]:
                self._missing[place] -= 1
        return self._start(now)

    def _measure(self, size: int, now: Time) -> None:
        """The oldest chunk under way has arrived."""
        started = self._under_way.popleft()
        self._took += now - max(started, self._heard)
        self._expected += self._job.cost.time(size)
        if started >= self._heard:  # the link was idle, and what came before hides no delay
            self._expected += self._job.cost.delay(size)
        self._heard = now

    def _judge(self) -> None:
        """Plan anew if in all of the latest steps the link was slower, or faster, than planned for."""
        if self._expected:
            self._recent.append(self._took / self._expected)
        self._took = self._expected = 0
        slower = min(self._recent, default=0) > self._slowness * (1 + DRIFT)
        faster = max(self._recent, default=0) * (1 + DRIFT) < self._slowness
        if len(self._recent) == _STEPS and (slower or faster):
            self._slowness = 2 ** (round(_NOTCHES * math.log2(max(median(self._recent), _LEAST))) / _NOTCHES)
            self._recent.clear()
            self._adopt()

    def _adopt(self) -> None:
        cost = _slowed(self._job.cost, self._margin * self._slowness)
        self._chunks = self._plan(replace(self._job, cost=cost, separate=False, beside=False))
        tasks = [{piece.task for piece in chunk.pieces} for chunk in self._chunks]
        self._tasks_of = [len(each) for each in tasks]
        self._chunks_of: list[list[int]] = [[] for _ in self._job.tasks]
        for place, each in enumerate(tasks):
            for task in each:
                self._chunks_of[task].append(place)

    def _reset(self) -> None:
        self._missing = list(self._tasks_of)
        self._sent = [False] * len(self._chunks)
        self._next = 0

    def _start(self, now: Time) -> list[Action]:
        actions: list[Action] = []
        count = len(self._chunks)
        while self._next < count and (self._sent[self._next] or not self._missing[self._next]):
            if not self._sent[self._next]:
                actions.append(self._send(self._next, now))
            self._next += 1
        if not self._under_way:
            ready = (k for k in range(self._next, count) if not self._sent[k] and not self._missing[k])
            if (place := next(ready, None)) is not None:
                actions.append(self._send(place, now))
        return actions

    def _send(self, place: int, now: Time) -> Start:
        self._sent[place] = True
        self._under_way.append(now)
        return Start(self._chunks[place])


def _slowed(cost: CostModel, factor: float) -> CostModel:
    """Return the cost of a link that is ``factor`` times as slow."""
    slower = {name: round(factor * getattr(cost, name)) for name in ("overhead", "per_byte", "floor")}
    return replace(cost, **slower)
