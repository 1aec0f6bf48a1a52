"""Forecast of a live simulation: times, memory, and their uncertainty.

# Note [Critical path]
Critical path of a step: the chain of intervals, from rank to rank, that determines its time.

# Note [Binding intervals]
The path is walked backwards from the end of the last step of the rank that ends it last to where that step began.
Something that ends at t began at s because of what was over last before it:

- a kernel that its stream had to wait for: what ended at s on the same stream, or on another of its GPU, for which
  the stream waited with an event;
- a kernel or communication that was launched no earlier: the host, which was busy since it had last stopped for its
  GPU; then what ended on the GPU when the host went on;
- a communication: its member that came last, on whatever rank.

Times are whole picoseconds and what waits goes on in the very picosecond, so that what binds is told by its end; where
several end together, each bound as much as the others, and that of the same stream is taken. So the pieces of the path
fill the step without gap or overlap. Waiting for others is never on it: what they did in the meantime is.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from statistics import median
from typing import Literal, NamedTuple

from foretrain.device import Device
from foretrain.errors import ForetrainError
from foretrain.live.rank_trace import Activity, RankTrace, Save, StepBreakdown
from foretrain.units import SECOND, Time

EXCHANGE_SIGMA = 0.05
"""Relative error of a collective's predicted time: in benchmarks/collectives.py the median is 3.6 %."""


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Memory of one rank at its peak, bytes.

    Attributes:
        allocated: by tensors.
        reserved: from the GPU, by PyTorch's caching allocator.
        breakdown: of ``allocated``, what it was for.
        retries: how often the allocator had to release its cache to go on.
        timeline: of the last step, the duration of the kernels launched since it began, ps, and what is allocated then;
            where steps allocate often, the most of a moment.
    """

    allocated: int
    reserved: int
    breakdown: Mapping[str, int]
    retries: int = 0
    timeline: Sequence[tuple[Time, int]] = ()


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """Checkpoint that the script saved after a step.

    Attributes:
        step: steps that the optimizer had made; the next contains the checkpoint.
        calls: functions that saved, each with the script's line.
        size: bytes of all ranks; of files only those of live ranks.
        largest: bytes of the GPU that writes most.
        time: for which saving stopped the rank that it stopped longest, ps: copies to the host, and messages.
        partial: whether ranks that are represented may have saved files, of which nothing is known.
    """

    step: int
    calls: tuple[str, ...]
    size: int
    largest: int
    time: Time
    partial: bool


_LEAST_CHECKPOINT = 0.01
"""Bytes of all ranks over those of a GPU's parameters from which on files are a checkpoint, and not e.g. a loss."""


def _checkpoints(rank_traces: Mapping[int, RankTrace], members: Mapping[int, int]) -> Iterator[SavedCheckpoint]:
    """Yield the checkpoints, by step; see Note [Shares of a checkpoint] in `foretrain.live.device.checkpoints`."""
    breakdowns = [rank_trace.memory.get("breakdown", {}) for rank_trace in rank_traces.values()]
    least = _LEAST_CHECKPOINT * max((breakdown.get("parameters", 0) for breakdown in breakdowns), default=0)
    by_step: defaultdict[int, list[tuple[int, Save]]] = defaultdict(list)
    for rank, rank_trace in rank_traces.items():
        for save in rank_trace.saves:
            by_step[save.step].append((rank, save))
    for step, saves in sorted(by_step.items()):
        sizes, times = Counter[int](), Counter[int]()
        total = 0
        for rank, save in saves:
            alike = members[rank]
            written = sum(size * min(alike, parts) for parts, size in save.shares)
            files = sum(size for parts, size in save.shares if not parts)
            total += written + files
            sizes[rank] += written // alike + files
            times[rank] += save.time
        if total < least:
            continue
        yield SavedCheckpoint(
            step,
            tuple(dict.fromkeys(f"{save.call} at {save.line}" for _, save in saves)),
            total,
            max(sizes.values()),
            max(times.values()),
            any(members[rank] > 1 and not parts for rank, save in saves for parts, _ in save.shares),
        )


@dataclass(frozen=True, slots=True)
class RankForecast:
    """Forecast of one live rank and of those it represents.

    Attributes:
        rank: in the world.
        members: how many ranks are like it, itself included.
        steps: the account of every step; see Note [Step breakdown] in `foretrain.live.rank_trace`.
        memory: at its peak.
        flops: of the median step; recomputation by activation checkpointing counts again.
        recomputed: of them, for the second time.
        times: of its kernels, by provenance: measured, interpolated, modelled, unknown.
        spread: standard deviation of all these, ps.
        kernels: launched in it.
        warmup: first steps that do not count.
        by_name: time of its kernels by name, ps; empty where not recorded.
        updates: what of it optimizers' steps have launched.
        saving: numbers of steps with a checkpoint, of any rank, which do not count either.
    """

    rank: int
    members: int
    steps: tuple[StepBreakdown, ...]
    memory: PeakMemory
    flops: float
    recomputed: float
    times: tuple[Time, ...]
    spread: Time
    kernels: int
    warmup: int = 2
    by_name: Mapping[str, Time] = field(default_factory=dict)
    updates: Mapping[str, Time] = field(default_factory=dict)
    saving: frozenset[int] = frozenset()

    @property
    def steady(self) -> tuple[StepBreakdown, ...]:
        """Return the steps after the warm-up, or the last where there are few; without checkpoints where possible."""
        return _steady(self.steps, self.warmup, self.saving)

    def mean(self, name: str) -> Time:
        """Return the mean of one of an account's times, over the steady steps."""
        return round(sum(getattr(step, name) for step in self.steady) / len(self.steady))


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast of a script on a cluster.

    Attributes:
        cluster: as text.
        device: the GPU.
        world: ranks.
        classes: which rank represents which, as text.
        ranks: the live ones.
        links: bytes that each link of the network carried in all.
        warnings: what the ranks warned of, and how often.
        unknown: operators charged for their bytes, or for arithmetic at an efficiency that is a guess.
        wall: seconds that the simulation took.
        stack_range: of measurements of runs like it about their forecasts; see `foretrain.device.forecast_range`.
        checkpoints: what the script saved.
        stand_ins: libraries that are not installed, for which the script has imported a stand-in, by name.
    """

    cluster: str
    device: Device
    world: int
    classes: tuple[str, ...]
    ranks: tuple[RankForecast, ...]
    warnings: Mapping[str, int]
    unknown: tuple[str, ...]
    wall: float
    stack_range: float = 0.0
    checkpoints: tuple[SavedCheckpoint, ...] = ()
    stand_ins: tuple[str, ...] = ()

    @property
    def saves_always(self) -> bool:
        """Return whether every step that counts contains a checkpoint, so that `iteration_time` does."""
        return any(step.number in rank.saving for rank in self.ranks for step in rank.steady)

    @property
    def first(self) -> RankForecast:
        """Return the live rank with the least number."""
        return self.ranks[0]

    @property
    def iteration_time(self) -> Time:
        """Return the median over the steady steps of the slowest rank, ps."""
        return max(round(median(step.end - step.begin for step in rank.steady)) for rank in self.ranks)

    @property
    def sigma(self) -> Time:
        """Return the standard deviation of `iteration_time`, ps: of operators' times and exposed communication."""
        slowest = max(self.ranks, key=lambda rank: rank.mean("compute"))
        return round(math.hypot(slowest.spread, EXCHANGE_SIGMA * slowest.mean("exposed")))

    @property
    def interval(self) -> tuple[Time, Time]:
        """Return between which times a measurement lies with a probability of 95 %, ps.

        Wider where the operators of this run are modelled rather than measured: to `stack_range` are added two standard
        deviations of its own, as independent errors add up.
        """
        width = math.exp(math.hypot(self.stack_range, 2 * self.sigma / self.iteration_time))
        return round(self.iteration_time / width), round(self.iteration_time * width)

    @property
    def flops(self) -> float:
        """Return the mean FLOP/s of one GPU, recomputation counted once."""
        useful = sum((rank.flops - rank.recomputed) * rank.members for rank in self.ranks) / self.world
        return useful / (self.iteration_time / SECOND)

    @property
    def mfu(self) -> float | None:
        """Return model FLOPs utilisation: `flops` as part of the GPU's dense bf16 peak; None where it has none."""
        arithmetic = self.device.bf16 or self.device.fp16
        return self.flops / arithmetic.peak if arithmetic else None


def forecast_of(
    rank_traces: Mapping[int, RankTrace],
    members: Mapping[int, int],
    *,
    cluster: str,
    device: Device,
    world: int,
    classes: Sequence[str],
    wall: float,
    stack_range: float = 0.0,
) -> Forecast:
    """Return the forecast from the traces of the live ranks.

    Raises:
        ForetrainError: no rank has made a step of an optimizer, or time has not advanced.
    """
    stepless = [rank for rank, rank_trace in rank_traces.items() if not rank_trace.steps]
    if len(stepless) == len(rank_traces):
        raise ForetrainError(
            "the script has ended without a step of an optimizer of torch.optim, or three backward passes without "
            "one, so there is no iteration to forecast; see whether it trains at all, and for at least one step"
        )
    checkpoints = tuple(_checkpoints(rank_traces, members))
    saving = frozenset(checkpoint.step + 1 for checkpoint in checkpoints)
    ranks = tuple(
        _rank(rank, members[rank], rank_trace, saving)
        for rank, rank_trace in sorted(rank_traces.items())
        if rank not in stepless
    )
    warnings = warnings_of(rank_traces)
    costs = [rank_trace.cost(rank_trace.steps[-1].number) for rank_trace in rank_traces.values() if rank_trace.steps]
    unknown = sorted({name for cost in costs for name in cost["unknown"]})
    unused = set.intersection(*({*cost["unused"]} for cost in costs))
    stand_ins = sorted({name for rank_trace in rank_traces.values() for name in rank_trace.stand_ins})
    found = Forecast(
        cluster,
        device,
        world,
        tuple(classes),
        ranks,
        warnings,
        tuple(unknown),
        wall,
        stack_range,
        checkpoints,
        tuple(stand_ins),
    )
    warnings.update(dict.fromkeys([*_step_warnings(found), *map(_unused_warning, sorted(unused))], 1))
    if found.iteration_time <= 0:
        raise ForetrainError(
            "the script's steps took no virtual time at all: nothing was launched on the simulated GPUs"
        )
    return found


def _step_warnings(found: Forecast) -> Iterator[str]:
    """Yield warnings of results that are of a step unlike others: the first, or one that contains a checkpoint."""
    if len(found.first.steps) == 1:
        yield (
            "the script made one step, which allocates memory and sets up communication as no later one does: "
            "let it make three"
        )
    if found.saves_always:
        yield (
            "every step that counts contains a checkpoint, so the iteration contains it as well: "
            "let the script make more steps, or save less often"
        )
    elif found.first.steps[-1].number in found.first.saving:
        yield "the last step contains a checkpoint: links and the critical path are those of that step"


def _unused_warning(name: str) -> str:
    return (
        f"no kernel took its cost from the entry {name!r} of --costs: none that was launched has this name, or a later "
        "entry has it, too; an operator written in Python is charged for the kernels that it launches"
    )


def warnings_of(rank_traces: Mapping[int, RankTrace]) -> dict[str, int]:
    """Count the ranks' warnings."""
    warnings: Counter[str] = Counter()
    for rank_trace in rank_traces.values():
        warnings.update(rank_trace.warnings)
    return dict(warnings)


def _steady(steps: Sequence[StepBreakdown], warmup: int, saving: frozenset[int]) -> tuple[StepBreakdown, ...]:
    late = tuple(steps[warmup:] or steps[-1:])
    return tuple(step for step in late if step.number not in saving) or late


def _median(steps: Sequence[StepBreakdown]) -> StepBreakdown:
    """Return the step of median duration, whose work is counted: the last need not be like the others."""
    return sorted(steps, key=lambda step: step.end - step.begin)[(len(steps) - 1) // 2]


def _rank(rank: int, members: int, rank_trace: RankTrace, saving: frozenset[int]) -> RankForecast:
    cost = rank_trace.cost(_median(_steady(rank_trace.steps, rank_trace.warmup, saving)).number)
    noted = rank_trace.memory or {"allocated": 0, "reserved": 0, "breakdown": {}, "retries": 0, "timeline": ()}
    timeline = tuple((time, size) for time, size in noted["timeline"])
    return RankForecast(
        rank=rank,
        members=members,
        steps=tuple(rank_trace.steps),
        memory=PeakMemory(noted["allocated"], noted["reserved"], noted["breakdown"], noted["retries"], timeline),
        flops=cost["flops"],
        recomputed=cost["recomputed"],
        times=tuple(cost["times"]),
        spread=cost["spread"],
        kernels=cost["kernels"],
        warmup=rank_trace.warmup,
        by_name=cost["by_name"],
        updates=cost["updates"],
        saving=saving,
    )


MESSAGES = ("send", "recv")


class PathSegment(NamedTuple):
    """Segment of a critical path; times in ps.

    Attributes:
        rank: where it happened.
        kind: ``"unseen"`` is what happened on a rank before its activities were kept.
        name: of the kernel or communication; as `title` says.
        begin: when it bound first.
        end: when the next piece began.
    """

    rank: int
    kind: Literal["kernel", "communication", "host", "unseen"]
    name: str
    begin: Time
    end: Time


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """Critical path of one step.

    Attributes:
        rank: the one whose step ended last.
        begin: of that step.
        end: of that step.
        pieces: by time; each begins where the one before ends.
    """

    rank: int
    begin: Time
    end: Time
    pieces: tuple[PathSegment, ...]

    def shares(self) -> dict[str, float]:
        """Return each name's part of the step's time, largest first; they sum to 1."""
        return dict(sorted(self._parts("name").items(), key=lambda part: (-part[1], part[0])))

    def kinds(self) -> dict[str, float]:
        """Return each kind's part of the step's time."""
        return dict(sorted(self._parts("kind").items()))

    def _parts(self, attribute: str) -> dict[str, float]:
        found: defaultdict[str, Time] = defaultdict(int)
        for piece in self.pieces:
            found[getattr(piece, attribute)] += piece.end - piece.begin
        return {key: time / (self.end - self.begin) for key, time in found.items()}


def critical_path(rank_traces: Mapping[int, RankTrace]) -> CriticalPath | None:
    """Return the path of the last step; see Note [Binding intervals]. None without activities or steps."""
    stepped = [rank_trace for rank_trace in rank_traces.values() if rank_trace.traced and rank_trace.steps]
    if not stepped:
        return None
    last = max(stepped, key=lambda rank_trace: (rank_trace.steps[-1].end, -rank_trace.rank))
    begin, end = last.steps[-1].begin, last.steps[-1].end
    pieces = list(_Walk(rank_traces).back(last.rank, begin, end))
    return CriticalPath(last.rank, begin, end, tuple(reversed(pieces))) if end > begin else None


def title(activity: Activity) -> str:
    """Return the name to sum under: a kernel's, or an operation with its number of ranks and their spacing."""
    if activity.kind != "communication":
        return activity.name
    if activity.name in MESSAGES:
        return "send/recv"
    group = activity.group
    spacings = {after - before for before, after in pairwise(group)}
    apart = spacings.pop() if len(spacings) == 1 else 1
    return f"{activity.name} of {len(group)} ranks" + (f", 1 in {apart}" if apart > 1 else "")


class _Walk:
    """Index of activities by their end on every rank, and of the members of each communication."""

    def __init__(self, rank_traces: Mapping[int, RankTrace]) -> None:
        self._rank_traces = rank_traces
        self._ended: dict[int, defaultdict[Time, list[Activity]]] = {}
        self._met: defaultdict[object, list[tuple[int, Activity]]] = defaultdict(list)
        for rank, rank_trace in rank_traces.items():
            ended = self._ended[rank] = defaultdict(list)
            for activity in rank_trace.activities():
                if activity.kind == "annotation" or activity.end == activity.start:
                    continue
                ended[activity.end].append(activity)
                if activity.kind == "communication":
                    self._met[_comm_key(activity)].append((rank, activity))

    def back(self, rank: int, begin: Time, end: Time) -> Iterator[PathSegment]:
        """Yield the segments, last first."""
        stream, time, launched = -1, end, False
        while time > begin:
            activity = None if launched else self._that_ended(rank, time, stream)
            if activity is None:
                piece, stream, launched = self._host(rank, time), -1, False
                time = piece.begin
            elif activity.kind == "communication":
                here = rank
                rank, binding = max(self._met[_comm_key(activity)], key=lambda met: (met[1].reached, met[0] == here))
                piece = PathSegment(here, "communication", title(activity), binding.reached, time)
                stream, time = binding.stream, binding.reached
            else:
                piece = PathSegment(rank, "kernel", title(activity), activity.start, time)
                stream, time, launched = activity.stream, activity.start, activity.start > activity.reached
            yield piece._replace(begin=max(piece.begin, begin))

    def _host(self, rank: int, time: Time) -> PathSegment:
        """Return the segment of the host from its last stop until ``time``."""
        rank_trace = self._rank_traces[rank]
        before = bisect_left(rank_trace.stops, time, key=attrgetter("answered"))
        kind = "host" if time > rank_trace.since else "unseen"
        return PathSegment(rank, kind, kind, rank_trace.stops[before - 1].answered if before else 0, time)

    def _that_ended(self, rank: int, time: Time, stream: int) -> Activity | None:
        """Return the activity that ended at ``time``, on ``stream`` if possible."""
        ended = self._ended[rank].get(time)
        return min(ended, key=lambda activity: (activity.stream != stream, activity.stream)) if ended else None


def _comm_key(activity: Activity) -> object:
    """Return a key that all members of a communication share."""
    name = "message" if activity.name in MESSAGES else activity.name
    return name, activity.group, activity.start, activity.end
