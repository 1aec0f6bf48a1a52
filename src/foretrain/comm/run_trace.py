"""Trace of a real run, as the same spans as a simulated one."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from foretrain.comm.bounded.ledger import Ledger, LossEntry
from foretrain.tasks import Chunk
from foretrain.trace import Span, Timeline
from foretrain.units import NANOSECOND, Time
from foretrain.workload.step import Workload


class CommRecord(NamedTuple):
    """Times at which a chunk was issued and completed, in nanoseconds of the monotonic clock."""

    chunk: Chunk
    issued: int
    completed: int


class Applied(NamedTuple):
    """Times at which a batch of updates began and ended, in nanoseconds of the monotonic clock."""

    tasks: tuple[int, ...]
    step: int
    began: int
    ended: int


class _Entry(NamedTuple):
    """Forward call of a module: its time, and the time at which its parameters were there, both in ps."""

    name: str
    asked: Time
    began: Time


class RunTrace:
    """Times on the training thread. On a GPU they are the host's, which runs ahead of the device.

    Args:
        origin: ns of the monotonic clock that count as 0.

    Attributes:
        begins: start of each backward pass, ps.
    """

    def __init__(self, origin: int) -> None:
        self._origin = origin
        self.begins: list[Time] = []
        self._forwards: list[list[_Entry]] = []
        self._gradients: list[list[tuple[int, Time]]] = []
        self._entries: list[_Entry] = []
        self._updates: list[tuple[Time, Time]] = []

    def now(self) -> Time:
        """Return the picoseconds since the origin."""
        return (time.perf_counter_ns() - self._origin) * NANOSECOND

    def begin_forward(self) -> None:
        """Note that a forward pass begins."""
        self._entries = []

    def enter(self, name: str, asked: Time) -> None:
        """Note that module ``name`` begins now, and was called at ``asked``."""
        self._entries.append(_Entry(name, asked, self.now()))

    def end_forward(self) -> None:
        """Note that the forward pass ends and a backward pass begins."""
        self.begins.append(self.now())
        self._forwards.append(self._entries)
        self._gradients.append([])
        self._entries = []

    def gradient(self, task: int) -> None:
        """Note that the gradient of ``task`` is ready."""
        if self._gradients:
            self._gradients[-1].append((task, self.now()))

    def update(self, took: Time) -> None:
        """Note that a whole optimizer step, which took ``took`` ps, has ended."""
        self._updates.append((self.now() - took, self.now()))

    def timeline(
        self, workload: Workload, sent: Sequence[CommRecord], applied: Sequence[Applied], lost: Ledger | None = None
    ) -> Timeline:
        """Return everything so far as spans: lanes "gpu", "optimizer", "wire", and "lost" where there is a ledger.

        As in the simulator, step k is backward pass k and the forward pass after it.
        """
        names = [gradient.name for gradient in workload.gradients]
        layers = [workload.layers[gradient.layer].name for gradient in workload.gradients]
        spans = [*self._computed(layers), *self._sent(names, sent), *self._applied(layers, applied)]
        spans += self._lost(names, lost.entries, lost.lost.shape[1]) if lost is not None else ()
        return Timeline(sorted(spans, key=lambda span: span.start))

    def _computed(self, layers: Sequence[str]) -> Iterator[Span]:
        for step, (entries, end, gradients) in enumerate(
            zip(self._forwards, self.begins, self._gradients, strict=True)
        ):
            following = [*(entry.asked for entry in entries[1:]), end]
            for entry, until in zip(entries, following, strict=False):  # the first step may wait for nothing
                if entry.began - entry.asked > 50_000 * NANOSECOND:
                    yield Span("gpu", "wait", entry.name, step - 1, entry.asked, entry.began)
                yield Span("gpu", "forward", entry.name, step - 1, entry.began, max(entry.began, until))
            before = end
            for task, when in gradients:
                if when > before:
                    yield Span("gpu", "backward", layers[task], step, before, when)
                before = max(before, when)
        for start, end in self._updates:
            yield Span("gpu", "update", "all", bisect_right(self.begins, start) - 1, start, end)

    def _sent(self, names: Sequence[str], sent: Sequence[CommRecord]) -> Iterator[Span]:
        free: Time = 0
        for record in sent:
            start, end = max(free, self._ps(record.issued)), self._ps(record.completed)
            more = len(record.chunk.pieces) - 1
            name = names[record.chunk.pieces[0].task] + (f" +{more}" if more else "")
            yield Span(
                "wire", "communication", name, self._step(self._ps(record.issued)), start, end, record.chunk.size
            )
            free = end

    def _applied(self, layers: Sequence[str], applied: Sequence[Applied]) -> Iterator[Span]:
        for batch in applied:
            start, end = self._ps(batch.began), self._ps(batch.ended)
            yield Span("optimizer", "update", layers[batch.tasks[0]], self._step(start), start, end)

    def _lost(self, names: Sequence[str], entries: Iterable[LossEntry], ranks: int) -> Iterator[Span]:
        for entry in entries:
            whose = f"rank {entry.source}" if entry.source < ranks else "the server"
            when, name = self._ps(entry.when), f"{names[entry.task]} of {whose}"
            yield Span("lost", "communication", name, self._step(when), when, when, entry.size)

    def _step(self, when: Time) -> int:
        return bisect_right(self.begins, when) - 1

    def _ps(self, nanoseconds: int) -> Time:
        return (nanoseconds - self._origin) * NANOSECOND
