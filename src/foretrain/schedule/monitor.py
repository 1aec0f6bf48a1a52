"""Bandwidth monitor of a link, relative to the cost model, and the detection of lasting changes.

Prophet (ICPP'21 §4) asks for a periodic measurement; its published code takes the largest size/time once. Here every
acknowledgement counts, the estimate is a *high* quantile of slowness (a low one of bandwidth), because promising a
block more than the link can carry delays urgent data while promising less only idles it a little, and a lasting change
is reported as drift.

`LinkDrift` runs a monitor under any policy and reports when the link has changed.

Arrival times of gradients over the last steps form blocks (§3-4). A *block* is the gradients that leave the backward
pass at nearly the same instant. Frameworks aggregate and schedule, so gradients appear in steps and not one by one.
Prophet sends block by block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from foretrain.schedule.job import CostModel
from foretrain.tasks import Action, Done, Event, Start, StepBegin
from foretrain.units import COST_SHIFT, Time

if TYPE_CHECKING:
    from foretrain.engine import Policy
from dataclasses import dataclass
from itertools import pairwise
from statistics import median


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least ``share`` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


_JUDGED = 16
"""Measurements from which a lasting change is told; some two steps make as many."""
_LONG = 128
"""A measurement lasts at least this many times an operation's start-up."""


class Monitor:
    """Compares what chunks took with what the cost model says.

    Only chunks that found the link busy are measured, from the arrival before: what they took is the link's doing
    alone, whereas a chunk on an idle link also pays a delay that the next one hides. See Note [Several pipes].

    Args:
        cost: the model.
        share: quantile of bandwidth to promise, e.g. 0.1.
        window: measurements kept.
        span: how long one measurement must last at least, by the model; by default 128 times the smallest operation.

    Attributes:
        usual: the median slowness that was adopted.
        free_at: when the link should be free again.

    # Note [Several pipes]
    Where chunks cross several pipes, one behind a smaller one arrives late though the link was not slow: it had to
    leave the pipe before first. Only those behind one at least as large are measured.

    # Note [Jitter]
    Threads and switches deliver a chunk some milliseconds late and the next one early. Of a large chunk that is a few
    percent, of a small one many times what it should take, and a high quantile would be of nothing else: consecutive
    chunks are measured together until they should have taken many times as long as the smallest operation does.
    """

    def __init__(self, cost: CostModel, share: float, window: int = 128, span: Time | None = None) -> None:
        self._cost = cost
        self._share = share
        self._started: deque[tuple[Time, int, Time]] = deque()
        self._recent: deque[float] = deque(maxlen=window)
        self._judged = min(window, _JUDGED)
        self._arrived: Time = -1
        self._drained: Time = -1
        self._slowness = 1.0
        self.usual = 1.0
        self.free_at: Time = 0
        self._last = 0
        # How much later than they were due chunks leave the link, by all that is known.
        self._shift: Time = 0
        self._least = _LONG * cost.startup if span is None else span
        self._took: Time = 0
        self._span: Time = 0

    def start(self, now: Time, size: int) -> None:
        """Record that a chunk of ``size`` bytes was started; `free_at` moves on to when the link should be free
        again.
        """
        self.free_at = max(now, self.free_at) + self.time(size)
        self._started.append((now, size, self.free_at - self._shift))

    def done(self, now: Time) -> None:
        """The oldest chunk under way has arrived."""
        started, size, due = self._started.popleft()
        expected = self._cost.time(size)
        # What was started after the last left the link, though before it arrived, may have found the link idle.
        queued = started < self._drained and self._arrived < now
        if queued and (not self._cost.elsewhere or size <= self._last):
            self._measure(now - self._arrived, expected)
        self._arrived, self._drained, self._last = now, now - self._cost.delay(size), size
        self._correct(now, due)

    def _correct(self, now: Time, due: Time) -> None:
        """The oldest chunk has left the link now, and not when it was ``due``: so will those behind it."""
        late = self._drained - (due + self._shift)
        self._shift += late
        self.free_at = max(now, self.free_at + late) if self._started else now

    def _measure(self, took: Time, expected: Time) -> None:
        """Adds to the measurement in hand; it counts when it is long enough. See Note [Jitter]."""
        self._took, self._span = self._took + took, self._span + expected
        if self._span >= self._least:
            self._recent.append(self._took / self._span)
            self._took = self._span = 0

    def time(self, size: int) -> Time:
        """Return how long ``size`` bytes occupy the link by the present estimate."""
        return int(self._cost.time(size) * self._slowness)

    def fits(self, room: Time) -> int:
        """The most bytes one operation can carry in ``room``, by the present estimate."""
        if room < self._cost.floor * self._slowness:
            return 0
        return ((int(room / self._slowness) - self._cost.overhead) << COST_SHIFT) // max(1, self._cost.per_byte)

    def settle(self) -> None:
        """Adopt what was measured."""
        if self._recent:
            self._slowness = quantile(self._recent, 1 - self._share)
            self.usual = quantile(self._recent, 0.5)

    @property
    def judges(self) -> bool:
        """Return whether enough was measured to detect a lasting change."""
        return len(self._recent) >= self._judged

    def drifted(self, tolerance: float) -> bool:
        """Return whether the link has changed for good: the latest measurements' median is off by more than
        ``tolerance``.
        """
        return self.judges and abs(quantile(self._latest(), 0.5) / self.usual - 1) > tolerance

    def forget(self, tolerance: float) -> None:
        """Keeps only what was measured since the link is as it is now: what differs less from the latest median."""
        latest = self._latest()
        now = quantile(latest, 0.5)
        self._recent.clear()
        self._recent.extend(each for each in latest if abs(each / now - 1) <= tolerance)

    def _latest(self) -> list[float]:
        return list(islice(reversed(self._recent), self._judged))


DRIFT = 0.2
"""The share by which a link, or arrivals, must differ from what they were, in the median, to have changed for good."""


class Gauge:
    """Listens to one policy at a time.

    What it says is relative to what the link was under the same policy and knobs: a cost model that is a little wrong
    is wrong by more where chunks are smaller. Only what found the link busy is measured: of policies that wait for each
    chunk before they send the next, nothing. `watch` and the policy belong to an engine's thread, `taken` to all.

    Args:
        cost: what sending should take.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._changes: deque[float] = deque()

    def watch(self, policy: Policy) -> Policy:
        """``policy``, listened to."""
        return _Watched(policy, Monitor(self._cost, 0.5), self._changes.append)

    def taken(self) -> float | None:
        """Return the factor on link times once after a change; otherwise None."""
        slower = None
        while self._changes:
            slower = (slower or 1.0) * self._changes.popleft()
        return slower


class _Watched:
    """``policy``, whose chunks ``monitor`` measures."""

    def __init__(self, policy: Policy, monitor: Monitor, changed: Callable[[float], None]) -> None:
        self._policy, self._monitor, self._changed = policy, monitor, changed
        self._settled = False

    def handle(self, event: Event, now: Time) -> Sequence[Action]:
        """Return the wrapped policy's actions."""
        if type(event) is Done:
            self._monitor.done(now)
        elif type(event) is StepBegin:
            self._judge()
        actions = self._policy.handle(event, now)
        for action in actions:
            if type(action) is Start:
                self._monitor.start(now, action.chunk.size)
        return actions

    def _judge(self) -> None:
        before = self._monitor.usual
        if not self._monitor.judges:
            return
        if not self._settled:
            self._settled = True
            self._monitor.settle()
        elif self._monitor.drifted(DRIFT):
            self._monitor.forget(DRIFT)
            self._monitor.settle()
            self._changed(self._monitor.usual / before)


def blocks(releases: Sequence[Time], factor: float = 2.0) -> tuple[tuple[int, ...], ...]:
    """Indices of ``releases`` in release order, cut where the gap to the next exceeds ``factor`` times the mean gap.

    Gradients released together keep their given order. The comparison is exact, so scaling all times changes nothing.
    The mean is over all gaps, also the empty ones, as in the authors' code. O(n log n).
    """
    if not releases:
        return ()
    order = sorted(range(len(releases)), key=releases.__getitem__)
    numerator, denominator = float(factor).as_integer_ratio()
    limit = numerator * (releases[order[-1]] - releases[order[0]])
    gaps = len(order) - 1
    found = [[order[0]]]
    for before, after in pairwise(order):
        if (releases[after] - releases[before]) * gaps * denominator > limit:
            found.append([])
        found[-1].append(after)
    return tuple(tuple(block) for block in found)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The steps in which gradients arrive.

    Attributes:
        of: block of each task.
        sizes: tasks per block.
        durations: per block, from its first to its last arrival.
        intervals: A_k per block but the last, from its last arrival to the first of the next.
    """

    of: tuple[int, ...]
    sizes: tuple[int, ...]
    durations: tuple[Time, ...]
    intervals: tuple[Time, ...]


class Arrivals:
    """The last ``steps`` steps' arrival times of ``count`` tasks."""

    def __init__(self, count: int, steps: int) -> None:
        self._count = count
        self._steps: deque[list[Time]] = deque(maxlen=steps)
        self._current: dict[int, Time] = {}
        self._began: Time = 0

    def begin(self, now: Time) -> None:
        """Begin a backward pass; keep the previous one if every task arrived in it."""
        if len(self._current) == self._count:
            self._steps.append([self._current[i] for i in range(self._count)])
        self._current.clear()
        self._began = now

    def note(self, task: int, now: Time) -> None:
        """Record that ``task`` is ready."""
        self._current[task] = now - self._began

    @property
    def complete(self) -> bool:
        """Return whether all steps asked for have been seen."""
        return len(self._steps) == self._steps.maxlen

    def off(self, adopted: Sequence[Time], tolerance: float) -> bool:
        """Return whether arrivals have moved away from ``adopted`` by more than ``tolerance`` of it, all taken
        together.
        """
        moved = sum(abs(new - old) for new, old in zip(self.medians(), adopted, strict=True))
        return moved > tolerance * sum(adopted)

    def medians(self) -> list[Time]:
        """Median arrival of each task."""
        return [int(median(times)) for times in zip(*self._steps, strict=True)]

    def blocks(self, factor: float, share: float) -> Blocks:
        """Blocks of the median step; durations and intervals at the low quantile ``share`` of all steps."""
        found = blocks(self.medians(), factor)
        of = [0] * self._count
        for place, members in enumerate(found):
            for task in members:
                of[task] = place
        spans = [[(min(step[i] for i in b), max(step[i] for i in b)) for b in found] for step in self._steps]
        durations = [quantile((s[k][1] - s[k][0] for s in spans), share) for k in range(len(found))]
        intervals = [quantile((max(0, s[k + 1][0] - s[k][1]) for s in spans), share) for k in range(len(found) - 1)]
        return Blocks(tuple(of), tuple(len(b) for b in found), tuple(map(int, durations)), tuple(map(int, intervals)))
