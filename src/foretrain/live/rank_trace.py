"""Traces of ranks: step breakdowns and, if asked for, every kernel and communication.

# Note [Step breakdown]
A rank's step lasts from one STEP mark to the next. Every instant of it belongs to the first of these that fits: some
stream computes; some communication is under way (then it is *exposed*); some stream stands at a communication whose
other members have not come (*waiting*: stragglers, the bubble of a pipeline); or the GPU is *idle*: it waits for its
host. A run of kernels with gaps in which the host launches counts as computing for as long as its work takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from foretrain.live.event_log import (
    ANNOTATION,
    COST,
    EXPERTS,
    GATHERED,
    KERNEL,
    LOADS,
    MEMORY,
    NAME,
    NO_CODE,
    NO_FILE,
    RANK,
    SINGLED_OUT,
    STAND_IN,
    WARNING,
    LogRecord,
)
from foretrain.units import Time

HOST = -1
"""Stream number of the host's main thread; thread n of the host has that less n."""
_WARMUP = 2
"""Steps in which memory is allocated and the optimizer makes its state."""
_LONG = 100_000
"""Bounds of intervals to keep at most; then they are settled although the script has made no step."""


class StepBreakdown(NamedTuple):
    """Breakdown of one step of one rank; times in ps.

    Attributes:
        number: as the script's optimizer counted.
        begin: the mark before, or 0: the first step contains whatever came before it.
        end: its own mark.
        compute: some stream computed.
        communication: some communication was under way.
        exposed: the part of ``communication`` in which nothing was computed.
        waiting: neither, but a stream stood at a communication that lacked members.
        idle: the rest.
    """

    number: int
    begin: Time
    end: Time
    compute: Time
    communication: Time
    exposed: Time
    waiting: Time
    idle: Time


class Activity(NamedTuple):
    """Activity of one rank: an interval; times in ps.

    Unlike a `foretrain.trace.Span`, which belongs to a step and a lane of the training loop, it is what a simulated GPU
    did: a stream may have reached it long before it began, the host launched it earlier, and its step is found later.

    Attributes:
        kind: a kernel, a communication, or a range that the script has named.
        stream: number; of what the host does, `HOST` and below.
        name: of the kernel, operation or range.
        reached: when its stream got there.
        start: when it began: a communication, when all members had come.
        end: when it was over.
        size: bytes of a communication.
        group: world ranks of a communication; source and target of a message.
        provenance: where a kernel's duration is from, as the rank numbers it.
        launch: when the host launched the kernel or called the communication.
    """

    kind: Literal["kernel", "communication", "annotation"]
    stream: int
    name: str
    reached: Time
    start: Time
    end: Time
    size: int = 0
    group: tuple[int, ...] = ()
    provenance: int = 0
    launch: Time = 0


class HostSync(NamedTuple):
    """Interval in which the host blocked on its GPU; times in ps.

    Attributes:
        question: the query, as an index of `foretrain.live.event_log.QUESTIONS`.
        asked: when it blocked.
        answered: when it went on.
    """

    question: int
    asked: Time
    answered: Time


class Save(NamedTuple):
    """Call that saved tensors.

    Attributes:
        step: steps that the optimizer had made.
        call: the function.
        line: of the script.
        shares: bytes, by number of parts; see Note [Shares of a checkpoint] in `foretrain.live.device.checkpoints`.
        time: for which the host stood in it, less the time that its GPU took for what was launched before, ps.
    """

    step: int
    call: str
    line: str
    shares: tuple[tuple[int, int], ...]
    time: Time


class RankTrace:
    """Trace of one rank.

    Args:
        rank: in the world.
        kept: of how many last steps to keep the activities; None of all. Without steps nothing is thrown away.
        stepped: called with each step when it is complete.

    Attributes:
        steps: the accounts of all.
        memory: the last `MEMORY` note of the rank.
        warnings: texts and how often each came.
        said_rank: another rank that the script of a fake world says its one process is, or None.
        gathered: world ranks whose objects were gathered, by the script's line that does.
        singled_out: world ranks that the script asks for, each with the line that does.
        stand_ins: libraries that are not installed, for which the script has imported a stand-in.
        missing_file: the file for lack of which the script failed, or None.
        lacks_code: whether the script failed as it is no Python, or imports what is not there.
        wrong_experts: arguments of the ConfigError of loads of experts that do not fit the script; else empty.
        router_loads: of each of its routers, by number, the busiest expert's loads over the mean, step by step.
        traced: whether activities are kept.
        warmup: number of first steps that are not representative.
        status: with which exit status the rank has left, or None.
        marks: what the host's clock showed at each step's end, by number; the GPU may have been far behind.
        stops: where the host blocked on its GPU; only while activities are kept.
        saves: what the script saved, by time.
    """

    def __init__(
        self, rank: int, kept: int | None = 0, stepped: Callable[[int, StepBreakdown], None] | None = None
    ) -> None:
        self.rank = rank
        self.steps: list[StepBreakdown] = []
        self.memory: dict[str, Any] = {}
        self.warnings: dict[str, int] = {}
        self.wrong_experts: tuple[str, ...] = ()
        self.router_loads: dict[int, list[float]] = {}
        self.said_rank: int | None = None
        self.gathered: dict[str, set[int]] = {}
        self.singled_out: dict[int, str] = {}
        self.stand_ins: set[str] = set()
        self.missing_file: str | None = None
        self.lacks_code = False
        self.traced = kept != 0
        self.warmup = _WARMUP
        self.status: int | None = None
        self.marks: dict[int, Time] = {}
        self.stops: list[HostSync] = []
        self.saves: list[Save] = []
        self._kept, self._stepped = kept, stepped
        self._costs: dict[int, bytes] = {}
        self._payloads: dict[bytes, bytes] = {}
        self._names: dict[int, str] = {}
        # Begins and ends one after the other, back to back ones joined: what the next account is made of.
        self._computed: list[Time] = []
        self._communicated: list[Time] = []
        self._waited: list[Time] = []
        # Of the step under way, until when it is accounted for: computed, communicated, either, or waited as well.
        self._settled: Time = 0
        self._sums = [0, 0, 0, 0]
        self._came: dict[object, Time] = {}
        self._began: dict[object, Time] = {}
        self._runs: list[tuple[int, Time, Time, Time, tuple[Any, ...]]] = []
        self._operations: list[Activity] = []
        self._ranges: dict[int, list[tuple[Time, bool, str]]] = {}

    def ran(self, stream: int, reached: Time, begin: Time, end: Time, run: tuple[Any, ...]) -> None:
        """Account for a run of kernels until ``end``; ``stream`` got to it when ``reached``."""
        computed = self._computed
        if computed and computed[-1] == begin:
            computed[-1] = end
        else:
            computed += (begin, end)
        if self.traced:
            self._runs.append((stream, reached, begin, end, run))

    def settled(self) -> None:
        """Count all steps so far as warm-up: a policy's decisions repeat from the step under way on."""
        self.warmup = max(self.warmup, len(self.steps))

    def waited(self, since: Time, now: Time) -> None:
        """Account for a wait for other ranks, from ``since`` until now."""
        if since < now:
            self._waited += (since, now)

    def reached(self, what: object, time: Time) -> None:
        """Note that a stream gets to the communication ``what`` at ``time``."""
        self._came[what] = time

    def began(self, what: object, now: Time) -> None:
        """Mark the communication as begun: all members have arrived."""
        came = self._came[what]
        if came < now:
            self._waited += (came, now)
        self._began[what] = now

    def ended(
        self, what: object, now: Time, stream: int, name: str, size: int, group: tuple[int, ...], launch: Time
    ) -> None:
        """Account for the communication, which is over."""
        came, began = self._came.pop(what), self._began.pop(what)
        self._communicated += (began, now)
        if self.traced:
            self._operations.append(Activity("communication", stream, name, came, began, now, size, group, 0, launch))

    def stopped(self, question: int, asked: Time, answered: Time) -> None:
        """Note that the host was blocked on its GPU from ``asked`` until ``answered``."""
        if self.traced and answered > asked:
            self.stops.append(HostSync(question, asked, answered))

    def note(self, note: LogRecord) -> None:
        """Record a note of the rank."""
        if note.code == ANNOTATION and self.traced:
            self._ranges.setdefault(note.b, []).append((note.host, bool(note.a), note.payload.decode()))
        elif note.code == NAME:
            self._names[note.a] = note.payload.decode()
        elif note.code == MEMORY:
            self.memory = json.loads(note.payload)
        elif note.code == COST:
            self._costs[note.a] = self._payloads.setdefault(note.payload, note.payload)  # most steps are alike
        elif note.code == RANK:
            self.said_rank = note.a
        elif note.code == GATHERED:
            place, ranks = json.loads(note.payload)
            self.gathered.setdefault(place, set()).update(ranks)
        elif note.code == SINGLED_OUT:
            self.singled_out[note.a] = note.payload.decode()
        elif note.code == STAND_IN:
            self.stand_ins.add(note.payload.decode())
        elif note.code == NO_FILE:
            self.missing_file = note.payload.decode()
        elif note.code == NO_CODE:
            self.lacks_code = True
        elif note.code == EXPERTS:
            self.wrong_experts = tuple(json.loads(note.payload))
        elif note.code == LOADS:
            self.router_loads.setdefault(note.a, []).append(json.loads(note.payload))
        elif note.code == WARNING:
            text = note.payload.decode()
            self.warnings[text] = self.warnings.get(text, 0) + 1

    def saved(self, note: LogRecord, step: int, time: Time) -> None:
        """Record a save after ``step`` steps, for which the rank stood still for ``time``."""
        call, line, shares = json.loads(note.payload)
        self.saves.append(Save(step, call, line, tuple((parts, size) for parts, size in shares), time))

    def cost(self, step: int) -> dict[str, Any]:
        """Return the work that the rank launched in step number ``step``."""
        return json.loads(self._costs[step])

    def close(self, number: int, end: Time, running: Iterable[Time]) -> None:
        """Close step ``number``, which ended at ``end``; ``running`` are the begins of runs under way."""
        self.settle(end, running)
        compute, communication, either, any_of_them = self._sums
        begin, end = self.steps[-1].end if self.steps else 0, self._settled
        exposed, waiting, idle = either - compute, any_of_them - either, end - begin - any_of_them
        step = StepBreakdown(number, begin, end, compute, communication, exposed, waiting, idle)
        self.steps.append(step)
        self._sums = [0, 0, 0, 0]
        self._prune()
        if self._stepped is not None:
            self._stepped(self.rank, step)

    def settle(self, now: Time, running: Iterable[Time]) -> None:
        """Sum up the time until now, so that its intervals can be dropped."""
        begin, now = self._settled, max(now, self._settled)
        computed = [*self._computed, *_until(now, running)]
        either = [*computed, *self._communicated, *_until(now, self._began.values())]
        standing = (came for what, came in self._came.items() if what not in self._began)
        all_of_them = [*either, *self._waited, *_until(now, standing)]
        spans = (computed, either[len(computed) :], either, all_of_them)
        self._sums = [total + covered(each, begin, now) for total, each in zip(self._sums, spans, strict=True)]
        self._settled = now
        self._computed = _after(now, self._computed)
        self._communicated = _after(now, self._communicated)
        self._waited = _after(now, self._waited)

    @property
    def since(self) -> Time:
        """Return the time from which on all activities are known."""
        return self.steps[-self._kept].begin if self._kept and len(self.steps) >= self._kept else 0

    def is_long(self) -> bool:
        """Return whether so many intervals are kept that they should be settled though no step ends."""
        return len(self._computed) + len(self._communicated) + len(self._waited) > _LONG

    def activities(self) -> Iterator[Activity]:
        """Yield kernels, communications and named ranges; the first two stream by stream, in their order."""
        for stream, reached, begin, end, run in sorted(self._runs, key=lambda run: run[0]):
            yield from self._kernels(stream, reached, begin, end, run)
        yield from sorted(self._operations, key=lambda operation: operation.stream)
        for thread, marks in sorted(self._ranges.items()):
            open_ranges: list[tuple[Time, str]] = []
            for host, begins, name in marks:
                if begins:
                    open_ranges.append((host, name))
                elif open_ranges:
                    begin, name = open_ranges.pop()
                    yield Activity("annotation", HOST - thread, name, begin, begin, host)

    def _kernels(self, stream: int, reached: Time, begin: Time, end: Time, run: tuple[Any, ...]) -> Iterator[Activity]:
        """Yield the kernels of a run: as launched, or back to back and stretched if communication slowed them."""
        payload, work = run[9], run[4]
        if not payload:
            yield Activity("kernel", stream, f"{run[8]} kernels", reached, begin, end)
        stretched = end - begin != work
        at, done = reached, 0
        for name, provenance, launch, duration in KERNEL.iter_unpack(payload):
            if stretched:
                start = begin + (end - begin) * done // work
                done += duration
                over = begin + (end - begin) * done // work
            else:
                start = launch if launch > at else at
                over = start + duration
            title = self._names.get(name, f"kernel {name}")
            yield Activity("kernel", stream, title, at, start, over, provenance=provenance, launch=launch)
            at = over

    def _prune(self) -> None:
        if not self._kept or len(self.steps) < self._kept:
            return
        since = self.since
        self._runs = [run for run in self._runs if run[3] > since]
        self._operations = [operation for operation in self._operations if operation.end > since]
        self.stops = [stop for stop in self.stops if stop.answered > since]
        # The host may be far ahead of its GPU: what it names is as old as what it launched, not as what ran meanwhile.
        launched = self.marks.get(self.steps[-self._kept].number - 1, 0)
        for thread, marks in self._ranges.items():
            self._ranges[thread] = _since(launched, marks)


def covered(spans: list[Time], begin: Time, end: Time) -> Time:
    """Return how much of ``[begin, end)`` the union of ``spans`` covers: alternating begins and ends, in any order."""
    pairs = np.array(spans, np.int64).reshape(-1, 2).clip(begin, end)
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    reach = np.maximum.accumulate(np.concatenate([[begin], pairs[:, 1]]))
    return int(np.maximum(pairs[:, 1] - np.maximum(pairs[:, 0], reach[:-1]), 0).sum())


def _until(now: Time, begins: Iterable[Time]) -> list[Time]:
    """Return spans from each of ``begins`` to now."""
    return [bound for begin in begins if begin < now for bound in (begin, now)]


def _after(now: Time, spans: list[Time]) -> list[Time]:
    """Return the spans that are not over now."""
    pairs = np.array(spans, np.int64).reshape(-1, 2)
    return pairs[pairs[:, 1] > now].ravel().tolist()


def _since(time: Time, marks: list[tuple[Time, bool, str]]) -> list[tuple[Time, bool, str]]:
    """Keep the begins and ends of those nested ranges that ended after ``time`` or have not ended."""
    kept: list[tuple[Time, bool, str] | None] = list(marks)
    begins: list[int] = []
    for index, (host, opens, _) in enumerate(marks):
        if opens:
            begins.append(index)
            continue
        begin = begins.pop() if begins else None
        if begin is None or host <= time:
            kept[index] = None
            if begin is not None:
                kept[begin] = None
    return [mark for mark in kept if mark is not None]


class SimulationTrace:
    """Traces of all live ranks.

    Args:
        ranks: the live ranks.
        kept: of how many last steps to keep the activities; None of all, which grows with the run.
        stepped: called with (rank, step) whenever a rank has completed a step.

    Attributes:
        rank_traces: by rank.
        schedules: what policies exchanged, where they did.
        exchanged: bytes of the busiest rank over the mean, of each uneven all-to-all; only where loads of experts are
            given.
    """

    def __init__(
        self, ranks: Iterable[int], kept: int | None = 0, stepped: Callable[[int, StepBreakdown], None] | None = None
    ) -> None:
        self.rank_traces = {rank: RankTrace(rank, kept, stepped) for rank in ranks}
        self.schedules: Iterable[Any] = ()  # of `foretrain.live.scheduled_gradients.ModelSchedule`
        self.exchanged: list[float] = []
