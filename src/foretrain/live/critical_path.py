"""Critical path of a step: the chain of intervals, from rank to rank, that determines its time.

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

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Literal, NamedTuple

from foretrain.live.rank_trace import Activity, RankTrace
from foretrain.units import Time

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
