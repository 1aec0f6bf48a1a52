"""Ledger of what a job may lose and has lost, by tensor.

Before an operation it says what must arrive (small tensors, the first steps), and how urgent the policy has it. After
it, losses are booked to the tensors and to the ranks whose contributions they were, or whose copies of parameters.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretrain.comm.bounded import Hint, Loss
from foretrain.comm.bounded.guard import Guard
from foretrain.comm.bounded.plans import BoundedOperation
from foretrain.comm.buffers import BufferSlice, FlatLayout
from foretrain.comm.options import BoundedLoss
from foretrain.schedule import Job, Spec
from foretrain.tasks import AS_THEY_COME, Priorities, Task

_ENTRIES = 100_000
"""Losses that are kept one by one."""
_WAIT = 1.0
"""Seconds that the counts of a job wait for what a server has lost last."""


class LossEntry(NamedTuple):
    """Loss when it was booked, ns of the monotonic clock; of a task, and the bytes of which rank, N of a server."""

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
        rank: of this process.
        past: the job's ledger until its tensors changed, which this one goes on with.
        priorities: of the policy in force.

    Attributes:
        guard: of the tolerance, where the job asked for "auto".
        names: of the tensors: those of the tasks, then others that the job had before.
        lost: (tensors, ranks), bytes that were lost of each rank's contribution to sums that this rank computed, or, on
            rank 0, its server; to all sums once `gathered`.
        kept: (tensors, ranks), bytes of a server's parameters that kept their previous value on a rank; of this rank,
            and of all once `gathered`.
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
        rank: int = 0,
        past: Ledger | None = None,
        priorities: Priorities = AS_THEY_COME,
    ) -> None:
        self._rank = rank
        self._layout, self._transport, self._observed = layout, transport, observed
        self._whole = max(sum(task.size for task in tasks), 1)
        auto = transport.tolerance == "auto" and not observed
        self.guard = Guard(transport.reliable_steps) if auto else None
        self._asked: dict[tuple[BufferSlice, ...], deque[int]] = defaultdict(deque)
        """Steps of operations under way."""
        self._noted: dict[int, list[float]] = {}
        """Of each step, bytes that have been summed, and their sum of squares."""
        order = sorted(range(len(tasks)), key=lambda task: tasks[task].first_use)
        orders: dict[BoundedOperation, Sequence[int]] = {**priorities}
        # A server that updates is pushed to and pulled from at once, in the order of what the model waits for.
        orders["update"] = priorities.get("all_reduce") or priorities.get("all_gather", ())
        self._urgency = {
            operation: {task: place / len(tasks) for place, task in enumerate(each)}
            for operation, each in orders.items()
        }
        self._back = set(order[-(-len(order) // 2) :])
        """Tasks of the back half of the layers, which switches protect."""
        self._places = sorted((layout.place(task), task) for task in range(len(tasks)))
        self._vital = [task.size <= transport.reliable_bytes or task.index in reliable for task in tasks]
        self._known: dict[tuple[BoundedOperation, *tuple[BufferSlice, ...]], Hint] = {}
        self.names = [task.name for task in tasks]
        self.names += [name for name in past.names if name not in self.names] if past is not None else []
        self.lost = np.zeros((len(self.names), ranks), np.int64)
        self.kept = np.zeros_like(self.lost)
        self.sent = self._sent_before = self._steps_before = 0
        self._watches = True
        """True while the guard sees the losses of backward passes."""
        self._late: deque[tuple[tuple[BufferSlice, ...], Any]] = deque()
        """Operations, with their slices, of which the server's losses are not booked."""
        self._sent_by_all: int | None = None
        """Bytes that all ranks have handed over, once that is known."""
        self.entries: deque[LossEntry] = deque(maxlen=_ENTRIES)
        if past is not None:
            self._go_on(past)

    @classmethod
    def of(
        cls,
        transport: object,
        layout: FlatLayout,
        job: Job,
        schedule: Spec,
        ranks: int,
        *,
        observed: bool = False,
        reliable: Collection[int] = (),
        rank: int = 0,
        past: Ledger | None = None,
    ) -> Ledger | None:
        """Return the ledger of ``job`` that a ``transport`` needs, if any; other arguments are those of a ledger."""
        if not isinstance(transport, BoundedLoss):
            return None
        known = {"observed": observed, "reliable": reliable, "rank": rank, "past": past}
        return cls(layout, job.tasks, ranks, transport, priorities=schedule.build(job).priorities, **known)

    def _go_on(self, past: Ledger) -> None:
        """Begin with what ``past`` ended with."""
        past._book_late()
        for name, lost, kept in zip(past.names, past.lost, past.kept, strict=True):
            self.lost[self.names.index(name)], self.kept[self.names.index(name)] = lost, kept
        self.sent = self._sent_before = past.sent
        self._steps_before = past.step
        if self.guard is not None and past.guard is not None:
            self.guard = past.guard
            self.guard.begin_anew(self._steps_before)
            self._watches = past._watches

    @property
    def step(self) -> int:
        """Return the present step, counted from the first scheduled one of the job."""
        return self._steps_before + (self.sent - self._sent_before) // self._whole

    def hint(self, operation: BoundedOperation, slices: Sequence[BufferSlice]) -> Hint:
        """Return what a transport should know of an operation on ``slices`` of one buffer, one after the other.

        All ranks ask for the same operations in the same order, so that they agree on what is reliable.
        """
        key = operation, *slices
        if key not in self._known:
            parts, urgencies = self._parts(slices), self._urgency.get(operation, {})
            urgency = min((urgencies[task] for task, _, _ in parts if task in urgencies), default=0.0)
            vital = _extents(part for part in parts if self._vital[part[0]])
            important = _extents(part for part in parts if part[0] in self._back)
            tensors = self._tensors(slices) if self._transport.updates == "servers" else None
            self._known[key] = Hint(len(self._known), urgency, 0.0, vital, important, tensors)
        known = self._known[key]
        if operation == "all_gather":  # of sums that were handed over before
            return known
        step = self.step
        self.sent += self._bytes(slices)
        if self.guard is not None:
            self._asked[tuple(slices)].append(step)
        return replace(known, tolerance=self._tolerance(step))

    def _bytes(self, slices: Sequence[BufferSlice]) -> int:
        return sum((each.end - each.start) * self._layout.width(each) for each in slices)

    def _tolerance(self, step: int) -> float:
        if self._observed or step < self._transport.reliable_steps:
            return 0.0
        return self.guard.of_step(step) if self.guard is not None else float(self._transport.tolerance)

    def note(self, slices: Sequence[BufferSlice], work: object) -> set[int]:
        """Book the losses of an operation on ``slices`` that is done; return tasks whose parameters lost some."""
        if self.guard is not None:
            step = self._asked[tuple(slices)].popleft()
            self._show(self.guard, step, slices, getattr(work, "energy", float)())
        if getattr(work, "told", None) is not None:
            self._late.append((tuple(slices), work))
        self._book_late()
        return self._book(slices, getattr(work, "losses", []))

    def _book_late(self, wait: float = 0.0) -> None:
        """Book what a server has lost of operations that are done, of which it says so later than ranks do."""
        while self._late:
            slices, work = self._late[0]
            if (losses := work.losses_elsewhere(wait)) is None:
                return
            self._late.popleft()
            self._book(slices, losses)

    def _book(self, slices: Sequence[BufferSlice], losses: Sequence[Loss]) -> set[int]:
        """Book ``losses`` of an operation on ``slices``; return tasks whose parameters lost some."""
        stale = set[int]()
        for task, first, behind in self._parts(slices) if losses else ():
            for loss in losses:
                size = min(behind, loss.place + loss.size) - max(first, loss.place)
                if size > 0:
                    if loss.source < self.lost.shape[1]:
                        self.lost[task, loss.source] += size
                    else:
                        self.kept[task, self._rank] += size
                        stale.add(task)
                    self.entries.append(LossEntry(time.perf_counter_ns(), task, loss.source, size))
        return stale

    def observe_loss(self, value: float) -> None:
        """Show the guard the model's loss of this step, if there is a guard; ranks may show different ones.

        From then on the guard sees those that a script shows, and no more those of its backward passes.
        """
        if self.guard is not None:
            self._stop_watching()
            self.guard.observe(self.step, "loss", value)

    def watch_loss(self, value: float) -> None:
        """Show the guard the loss of this step's backward passes, until a script shows its own, or one is not positive.

        The guard compares by what factor losses differ, so that it knows nothing of those.
        """
        if self.guard is None or not self._watches:
            return
        if value <= 0:
            self._stop_watching()
        else:
            self.guard.observe(self.step, "loss", value)

    def _stop_watching(self) -> None:
        if self._watches and self.guard is not None:
            self.guard.forget_losses()
        self._watches = False

    def totals(self) -> list[int]:
        """Return bytes that this rank has handed over, that its sums have lost, flat, and that it has kept."""
        self._book_late(_WAIT)
        return [self.sent, *self.lost.ravel().tolist(), *self.kept[:, self._rank].tolist()]

    def gathered(self, rows: Sequence[Sequence[int]] | None) -> None:
        """Speak for the whole job from now on: ``rows`` are all ranks' `totals`, or None where some are not known."""
        if rows is not None:
            found, count = np.array(rows, np.int64), self.lost.size
            self._sent_by_all = int(found[:, 0].sum())
            self.lost, self.kept = found[:, 1 : count + 1].sum(0).reshape(self.lost.shape), found[:, count + 1 :].T

    def by_tensor(self) -> dict[str, list[int]]:
        """Return the bytes that were lost of each rank's contributions, by rank, of every tensor that lost some.

        They are those of `line`, which says of whom: the whole job, or this rank.
        """
        rows = zip(self.names, self.lost.tolist(), strict=True)
        return {name: by_rank for name, by_rank in rows if any(by_rank)}

    def line(self) -> str:
        """Return one line for people: how much was lost, of which tensors most, and from which rank.

        It is of this rank's sums, or of its server's, and of the whole job once all ranks' are `gathered`.
        """
        guarded = f"; tolerance {self.guard.tolerance:.2%}" if self.guard is not None else ""
        if self.guard is not None and self.guard.alarms:
            guarded += f", {len(self.guard.alarms)} times back to zero, last at {self.guard.alarms[-1]}"
        pulled, whose = self._sent_by_all, ""
        if pulled is None:
            pulled, whose = self.sent, " as far as this rank knows"
        # Of what N ranks have sent, this one sums an Nth, but a server everything.
        served = self._sent_by_all is None and self._transport.over == "ps"
        sent = pulled * (self.lost.shape[1] if served else 1)
        if not (self.lost.any() or self.kept.any()) or not sent:
            return f"nothing was lost{whose}{guarded}"
        text = f"{_percent(self.lost.sum() / sent)} of the gradients' bytes were lost{whose}"
        text += self._most(self.lost, "from")
        if self.kept.any():
            share = self.kept.sum() / pulled
            text += f"; {_percent(share)} of the pulled parameters' kept their previous value"
            text += self._most(self.kept, "on")
        return text + guarded

    def _most(self, found: NDArray[np.int64], where: str) -> str:
        """Return which tensors and which rank most of ``found`` is of, (tensors, ranks)."""
        by_task, by_rank = found.sum(1), found.sum(0)
        worst = [self.names[task] for task in np.argsort(-by_task)[:3] if by_task[task]]
        if not worst:
            return ""
        rank = int(by_rank.argmax())
        return f", most of {', '.join(worst)}, {by_rank[rank] / by_rank.sum():.0%} {where} rank {rank}"

    def _show(self, guard: Guard, step: int, slices: Sequence[BufferSlice], energy: float) -> None:
        """Add to the norm of ``step``'s sums; show it to ``guard`` once the step is over."""
        noted = self._noted.setdefault(step, [0.0, 0.0])
        noted[0] += self._bytes(slices)
        noted[1] += energy
        for each in sorted(self._noted):
            if self._noted[each][0] >= self._whole or each < step - 1:
                guard.observe(each, "norm", math.sqrt(self._noted.pop(each)[1]))

    def _tensors(self, slices: Sequence[BufferSlice]) -> NDArray[np.int64]:
        """Return what of each tensor is in ``slices``, as a `Hint` has it."""
        found = []
        for each in slices:
            for place, task in self._places:
                first, behind = max(place.start, each.start), min(place.end, each.end)
                if place.buffer == each.buffer and first < behind:
                    found.append((task, first - place.start, behind - place.start))
        return np.array(found, np.int64).reshape(-1, 3)

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


def _percent(share: float) -> str:
    return "less than 0.01%" if 0 < share < 0.00005 else f"{share:.2%}"


def _extents(parts: Iterable[tuple[int, int, int]]) -> NDArray[np.int64]:
    """Return the bytes of ``parts`` of tensors, as a `Hint` has them."""
    return np.array([(first, behind) for _, first, behind in parts], np.int64).reshape(-1, 2)
