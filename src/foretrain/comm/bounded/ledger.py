"""Ledger of what a job may lose and has lost, by tensor.

Before an operation it says what must arrive (small tensors, the first steps) and how urgent it is; after it, losses are
booked to the tensors and to the ranks whose contributions they were.

# Note [Guard]
``BoundedLoss(tolerance="auto")`` raises the tolerance while training goes on as it does without losses.
A round is sixteen steps. In a round with a tolerance every fourth step is a shadow: it loses nothing. After the round
two things are compared. Norms of summed gradients of the three steps before each shadow, with the shadow's: they may
be neither larger nor smaller. And the model's losses, where the script reports them: their slow mean, with the lowest
that it has been. A shadow's loss is that of parameters which lossy steps have changed, so that it proves nothing, and
a lowest mean cannot rise with a training that slowly diverges. Where both are alike, the tolerance doubles, up to a
tenth. Where not, it is zero at once, for one round, then for two, four and so on, and begins anew. After a pause of
eight rounds or more the losses of that pause, which lost nothing, are the new reference.

Alike is what differs by no more than a tenth beyond four standard errors, so that noise alone is hardly ever an alarm.

Every rank guards what it receives, on its own: what a sender may lose is up to the receiver. Sums are the same on all
ranks, so that they decide alike, but of an all-reduce that is split each rank sees its part alone.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretrain.comm.bounded import Hint, Loss
from foretrain.comm.buffers import BufferSlice, FlatLayout
from foretrain.comm.options import BoundedLoss
from foretrain.errors import ConfigError
from foretrain.tasks import Task

_ENTRIES = 100_000
"""Losses that are kept one by one."""

ROUND = 16
"""Steps between two decisions."""
SHADOW = 4
"""Of this many steps, the last loses nothing."""
FIRST, MOST = 0.005, 0.1
"""Tolerances, shares of bytes: the first, and the largest."""
_APART = 0.1
"""Difference of mean logarithms that is never an alarm: a tenth."""
_ERRORS = 4.0
"""Standard errors of each mean that are no alarm either."""
_JUMP = math.log(8)
"""Of one value over what it was: an alarm at once."""
_KEPT = 2 * ROUND
_SLOW = 4 * ROUND
"""Values whose mean a trend follows."""
_NORMAL_MEDIAN = 0.6745
"""Median of the absolute value of a normal variable, over its standard deviation."""
_LONG = 8
"""Rounds of a pause whose losses are a reference of their own."""


class _Noise:
    """Standard deviation of values about a mean that may drift or jump.

    It is the median of second differences, by what that is of normal values: a drift leaves no trace in these, and a
    jump one in two of them.
    """

    def __init__(self) -> None:
        self._latest, self._seconds = deque[float](maxlen=3), deque[float](maxlen=_SLOW)

    def add(self, value: float) -> None:
        """Take ``value`` into account."""
        self._latest.append(value)
        if len(self._latest) == 3:
            first, second, third = self._latest
            self._seconds.append(abs(first - 2 * second + third))

    @property
    def deviation(self) -> float:
        """Return the standard deviation."""
        return median(self._seconds or (0.0,)) / (_NORMAL_MEDIAN * math.sqrt(6))


class _Trend:
    """Slow mean of values, about the latest `_SLOW`, and the lowest that it has been."""

    def __init__(self) -> None:
        self.mean, self._count, self._round = 0.0, 0, 0.0
        self._of_values, self._of_rounds = _Noise(), _Noise()
        """Of single values, and of means of rounds: neighbours may have much in common."""
        self._lowest: tuple[float, float] | None = None
        """A mean, and its standard error over the noise."""

    @property
    def _noise(self) -> float:
        """Standard deviation of a value, as it shows in means."""
        return max(self._of_values.deviation, self._of_rounds.deviation * math.sqrt(ROUND))

    def add(self, value: float) -> None:
        """Let the mean follow ``value``."""
        self._count += 1
        self.mean += max(1 / self._count, 1 / _SLOW) * (value - self.mean)
        self._of_values.add(value)
        self._round += value / ROUND
        if self._count % ROUND == 0:
            self._of_rounds.add(self._round)
            self._round = 0.0
        now = self.mean, self._error
        if self._count >= ROUND and (self._lowest is None or self._upper(*now) < self._upper(*self._lowest)):
            self._lowest = now

    def above(self) -> float:
        """Return by how much the mean is surely above the lowest that it has been; negative if it need not be."""
        if self._lowest is None:
            return -math.inf
        return self.mean - _ERRORS * self._noise * self._error - self._upper(*self._lowest)

    def most(self) -> float:
        """Return what hardly any value exceeds while the mean is about the lowest."""
        return self._lowest[0] + _ERRORS * self._of_values.deviation if self._lowest is not None else math.inf

    @property
    def _error(self) -> float:
        """Standard error of the mean, over the noise: a mean that forgets has half the variance of one of `_SLOW`."""
        return math.sqrt(max(1 / self._count, 1 / (2 * _SLOW)))

    def _upper(self, mean: float, error: float) -> float:
        return mean + _ERRORS * self._noise * error


class Guard:
    """Guard of one job on one rank; see Note [Guard].

    Args:
        reliable_steps: of the first so many steps nothing is lost; they are compared with, too.

    Attributes:
        tolerance: of steps that are no shadows.
        alarms: reasons for which the tolerance went back to zero, with the step.
    """

    def __init__(self, reliable_steps: int) -> None:
        self.tolerance = 0.0
        self.alarms: list[str] = []
        self._begin = max(reliable_steps, ROUND)
        """Step with which the next round with a tolerance begins."""
        self._pause = 1
        self._losses = _Trend()
        self._norms, self._reliable = _Noise(), deque[float](maxlen=_KEPT)
        """Of steps without losses."""
        self._lossy: list[float] = []
        """Norms since the last step without losses."""
        self._apart: deque[float] = deque(maxlen=_KEPT)
        """Norms before each shadow less the shadow's, under the present tolerance."""

    def of_step(self, step: int) -> float:
        """Return the tolerance of ``step``."""
        if step < self._begin or self.tolerance == 0.0 or self.is_shadow(step):
            return 0.0
        return self.tolerance

    def is_shadow(self, step: int) -> bool:
        """Return whether ``step`` loses nothing in any case."""
        return step % SHADOW == SHADOW - 1

    def begin_anew(self, step: int) -> None:
        """Compare norms with later ones only, as the gradients from ``step`` on are others; lose nothing for a round.

        The tolerance and the reference of losses stay.
        """
        self._begin = max(self._begin, step + ROUND)
        self._norms = _Noise()
        self._reliable.clear()
        self._clear()

    def observe(self, step: int, name: str, value: float) -> None:
        """Note what ``step`` has led to.

        Args:
            step: from 0, ascending.
            name: "norm": of the summed gradient, or "loss": of the model after the update before.
            value: the number.

        Raises:
            ConfigError: the name is neither.
        """
        if name not in ("norm", "loss"):
            raise ConfigError("name", name, "is nothing that a guard compares", "write norm or loss")
        if not math.isfinite(value):
            if self.tolerance:
                self._alarm(step, f"the {name} is {value}")
            return
        logarithm = math.log(max(abs(value), 1e-30))
        lossy = self.of_step(step) > 0.0
        if (lossy or (self.tolerance and name == "loss")) and logarithm > self._most(name) + _JUMP:
            self._alarm(step, f"the {name} {value:.3g} is far above what it was")
            return
        if name == "loss":
            self._losses.add(logarithm)
            return
        self._note_norm(logarithm, lossy=lossy)
        if step >= self._begin - 1 and (step + 1 - self._begin) % ROUND == 0:
            self._decide(step)

    def _most(self, name: str) -> float:
        """Return the logarithm beyond which a value is no noise."""
        return max(self._reliable, default=math.inf) if name == "norm" else self._losses.most()

    def _note_norm(self, logarithm: float, *, lossy: bool) -> None:
        if lossy:
            self._lossy.append(logarithm)
            return
        if self._lossy:
            self._apart.append(fmean(self._lossy) - logarithm)
            self._lossy.clear()
        self._norms.add(logarithm)
        self._reliable.append(logarithm)

    def _decide(self, step: int) -> None:
        if (above := self._losses.above()) > _APART:
            reason = f"the loss is at least {math.expm1(above):.0%} above the lowest that it was"
        elif (apart := self._norms_apart()) is not None:
            reason = f"the norm is {abs(math.expm1(apart)):.0%} {'above' if apart > 0 else 'below'} that of steps "
            reason += "without losses"
        elif self.tolerance == 0.0 or self._apart:
            self._raise()
            return
        else:
            return
        self._alarm(step, reason)

    def _norms_apart(self) -> float | None:
        """Return how far norms with losses are from those without; None where that may be noise."""
        if len(self._apart) < 2:
            return None
        apart = fmean(self._apart)
        error = self._norms.deviation * math.sqrt((1 + 1 / (SHADOW - 1)) / len(self._apart))
        return apart if abs(apart) - _ERRORS * error > _APART else None

    def _raise(self) -> None:
        before, self.tolerance = self.tolerance, min(2 * self.tolerance or FIRST, MOST)
        if self.tolerance != before:
            self._clear()

    def _alarm(self, step: int, reason: str) -> None:
        """Go back to zero, or stay there, for a pause twice as long as the last."""
        if self.tolerance:
            self.alarms.append(f"step {step}, tolerance {self.tolerance:.2%}: {reason}")
        self.tolerance = 0.0
        self._begin = step + 1 + self._pause * ROUND
        if self._pause >= _LONG:
            self._losses = _Trend()
        self._pause *= 2
        self._clear()

    def _clear(self) -> None:
        self._lossy.clear()
        self._apart.clear()


class LossEntry(NamedTuple):
    """Loss when it was booked, ns of the monotonic clock; of a task's sum, and the bytes of which rank."""

    when: int
    task: int
    source: int
    size: int


class Ledger:
    """Ledger of one job on one rank.

    Args:
        layout: places of the gradients in flat buffers.
        tasks: indexed by task.
        ranks: N.
        transport: what the job asked for.
        observed: whether steps are only observed, of which nothing is lost.
        reliable: tasks of which nothing is lost, whatever their size.
        past: the job's ledger until its tensors changed, which this one goes on with.

    Attributes:
        guard: of the tolerance, where the job asked for "auto".
        names: of the tensors: those of the tasks, then others that the job had before.
        lost: (tensors, ranks), bytes that were lost of each rank's contribution to sums that this rank computed, or, on
            rank 0, its server.
        sent: bytes that were handed over.
        entries: the latest losses, one after the other, without those of ``past``.
    """

    def __init__(
        self,
        layout: FlatLayout,
        tasks: Sequence[Task],
        ranks: int,
        transport: BoundedLoss,
        *,
        observed: bool = False,
        reliable: Collection[int] = (),
        past: Ledger | None = None,
    ) -> None:
        self._layout, self._transport, self._observed = layout, transport, observed
        self._whole = max(sum(task.size for task in tasks), 1)
        auto = transport.tolerance == "auto" and not observed
        self.guard = Guard(transport.reliable_steps) if auto else None
        self._asked: dict[int, deque[int]] = defaultdict(deque)
        """Steps of operations under way, by slot."""
        self._noted: dict[int, list[float]] = {}
        """Of each step, bytes that have been summed, and their sum of squares."""
        order = sorted(range(len(tasks)), key=lambda task: tasks[task].first_use)
        self._urgency = {task: place / len(tasks) for place, task in enumerate(order)}
        self._places = sorted((layout.place(task), task) for task in range(len(tasks)))
        self._vital = [task.size <= transport.reliable_bytes or task.index in reliable for task in tasks]
        self._known: dict[tuple[BufferSlice, ...], tuple[int, float, NDArray[np.int64]]] = {}
        self.names = [task.name for task in tasks]
        self.names += [name for name in past.names if name not in self.names] if past is not None else []
        self.lost = np.zeros((len(self.names), ranks), np.int64)
        self.sent = self._sent_before = self._steps_before = 0
        self._of_job: NDArray[np.int64] | None = None
        """Sums over all ranks of what `totals` returns."""
        self.entries: deque[LossEntry] = deque(maxlen=_ENTRIES)
        if past is not None:
            self._go_on(past)

    @classmethod
    def of(
        cls,
        transport: object,
        layout: FlatLayout,
        tasks: Sequence[Task],
        ranks: int,
        *,
        observed: bool = False,
        reliable: Collection[int] = (),
        past: Ledger | None = None,
    ) -> Ledger | None:
        """Return the ledger that a ``transport`` needs, if any; arguments are those of a ledger."""
        if not isinstance(transport, BoundedLoss):
            return None
        return cls(layout, tasks, ranks, transport, observed=observed, reliable=reliable, past=past)

    def _go_on(self, past: Ledger) -> None:
        """Begin with what ``past`` ended with."""
        for name, lost in zip(past.names, past.lost, strict=True):
            self.lost[self.names.index(name)] = lost
        self.sent = self._sent_before = past.sent
        self._steps_before = past.step
        if self.guard is not None and past.guard is not None:
            self.guard = past.guard
            self.guard.begin_anew(self._steps_before)

    @property
    def step(self) -> int:
        """Return the present step, counted from the first scheduled one of the job."""
        return self._steps_before + (self.sent - self._sent_before) // self._whole

    def hint(self, slices: Sequence[BufferSlice]) -> Hint:
        """Return what a transport should know of an operation on ``slices`` of one buffer, one after the other.

        All ranks ask for the same operations in the same order, so that they agree on what is reliable.
        """
        key = tuple(slices)
        if key not in self._known:
            parts = self._parts(slices)
            urgency = min((self._urgency[task] for task, _, _ in parts), default=0.0)
            vital = [(first, behind) for task, first, behind in parts if self._vital[task]]
            self._known[key] = len(self._known), urgency, np.array(vital, np.int64).reshape(-1, 2)
        slot, urgency, vital = self._known[key]
        step = self.step
        self.sent += self._bytes(slices)
        if self.guard is not None:
            self._asked[slot].append(step)
        return Hint(slot, urgency, self._tolerance(step), vital)

    def _bytes(self, slices: Sequence[BufferSlice]) -> int:
        return sum((each.end - each.start) * self._layout.width(each) for each in slices)

    def _tolerance(self, step: int) -> float:
        if self._observed or step < self._transport.reliable_steps:
            return 0.0
        return self.guard.of_step(step) if self.guard is not None else float(self._transport.tolerance)

    def note(self, slices: Sequence[BufferSlice], work: object) -> None:
        """Book the losses of an operation on ``slices`` that is done."""
        losses: list[Loss] = getattr(work, "losses", [])
        if self.guard is not None:
            step = self._asked[self._known[tuple(slices)][0]].popleft()
            self._show(self.guard, step, slices, getattr(work, "energy", float)())
        for task, first, behind in self._parts(slices) if losses else ():
            for loss in losses:
                size = min(behind, loss.place + loss.size) - max(first, loss.place)
                if size > 0:
                    self.lost[task, loss.source] += size
                    self.entries.append(LossEntry(time.perf_counter_ns(), task, loss.source, size))

    def observe_loss(self, value: float) -> None:
        """Show the guard the model's loss of this step, if there is a guard; ranks may show different ones."""
        if self.guard is not None:
            self.guard.observe(self.step, "loss", value)

    def totals(self) -> list[int]:
        """Return bytes that this rank has handed over, and that its sums have lost of each tensor."""
        return [self.sent, *self.lost.sum(1).tolist()]

    def gathered(self, rows: Sequence[Sequence[int]] | None) -> None:
        """Let `line` speak for the whole job: ``rows`` are all ranks' `totals`, or None where some are not known."""
        if rows is not None:
            self._of_job = np.array(rows, np.int64).sum(0)

    def line(self) -> str:
        """Return one line for people: how much was lost, and of which tensors most.

        It is of this rank's sums, or of its server's, and of the whole job once all ranks' are `gathered`.
        """
        guarded = f"; tolerance {self.guard.tolerance:.2%}" if self.guard is not None else ""
        if self.guard is not None and self.guard.alarms:
            guarded += f", {len(self.guard.alarms)} times back to zero, last at {self.guard.alarms[-1]}"
        served = self._transport.over == "ps"
        if self._of_job is not None:
            sent, by_task, whose = int(self._of_job[0]), self._of_job[1:], ""
        else:  # of what N ranks have sent, this one sums an Nth, but a server everything
            sent, by_task = self.sent * (self.lost.shape[1] if served else 1), self.lost.sum(1)
            whose = " as far as this rank knows"
        total = int(by_task.sum())
        if not total or not sent:
            return f"nothing was lost{whose}{guarded}"
        worst = [self.names[task] for task in np.argsort(-by_task)[:3] if by_task[task]]
        return f"{total / sent:.2%} of the gradients' bytes were lost{whose}, most of {', '.join(worst)}{guarded}"

    def _show(self, guard: Guard, step: int, slices: Sequence[BufferSlice], energy: float) -> None:
        """Add to the norm of ``step``'s sums; show it to ``guard`` once the step is over."""
        noted = self._noted.setdefault(step, [0.0, 0.0])
        noted[0] += self._bytes(slices)
        noted[1] += energy
        for each in sorted(self._noted):
            if self._noted[each][0] >= self._whole or each < step - 1:
                guard.observe(each, "norm", math.sqrt(self._noted.pop(each)[1]))

    def _parts(self, slices: Sequence[BufferSlice]) -> list[tuple[int, int, int]]:
        """Return (task, first byte, byte behind the last) of each tensor's part of ``slices``."""
        found, at = [], 0
        for each in slices:
            width = self._layout.width(each)
            for place, task in self._places:
                first, behind = max(place.start, each.start), min(place.end, each.end)
                if place.buffer == each.buffer and first < behind:
                    begin = at + (first - each.start) * width
                    found.append((task, begin, begin + (behind - first) * width))
            at += (each.end - each.start) * width
        return found
