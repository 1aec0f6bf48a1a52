"""Process groups and their collectives.

The k-th collective of a group is the same for all members, and begins when all live members have reached it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Final, NamedTuple

from foretrain.errors import Disagreement
from foretrain.live.event_log import CONTRIBUTION, OPERATIONS, LogRecord
from foretrain.live.folding import Folding
from foretrain.live.network_traffic import CollectiveRequest, CommLaunches, Order, PendingComm
from foretrain.live.rank_trace import RankTrace
from foretrain.live.streams import SmShares, Stream, StreamEvent, late
from foretrain.units import Time, format_time

ROOTED: Final = (OPERATIONS.index("broadcast"), OPERATIONS.index("scatter"))
"""Operations to which only the root contributes."""


class CommGroup:
    """A process group, the same object for all its ranks.

    Attributes:
        members: world ranks in the group's order.
        live: the live members, in the same order.
        family: number of the family it was made in.
        index: rank in the group of each member.
        weights: how many members each of ``live`` stands for.
        called: how many collectives each of ``live`` has called.
        pending: collectives that some of ``live`` have called and some have not, by number.
        kept: collectives with a root that all have called, by number, where other groups may ask for its values.
        exchanged: where to note of each uneven all-to-all the bytes of the busiest rank over the mean; None to not.
    """

    def __init__(
        self, members: tuple[int, ...], family: int, folding: Folding, exchanged: list[float] | None = None
    ) -> None:
        self.members, self.family = members, family
        self.index = {rank: position for position, rank in enumerate(members)}
        self.weights = folding.multiplicity(members)
        self.live = tuple(rank for rank in members if rank in self.weights)
        self.called = dict.fromkeys(self.live, 0)
        self.pending: dict[int, Collective] = {}
        self.kept: dict[int, Collective] | None = {} if folding.uneven else None
        self.exchanged = exchanged
        self._folding = folding

    def stand_in(self, member: int) -> int:
        """Return the live member that represents ``member``."""
        stand_in = self._folding.representative(member)
        return stand_in if stand_in in self.weights else self.live[0]

    @cached_property
    def stand_ins(self) -> bytes:
        """Return the group ranks, int32, that represent each member; empty if each live one represents those behind."""
        found, last = [], 0
        usual = True
        for position, member in enumerate(self.members):
            found.append(self.index[self.stand_in(member)])
            last = position if member in self.weights else last
            usual = usual and found[-1] == last
        return b"" if usual else struct.pack(f"<{len(found)}i", *found)

    def __str__(self) -> str:
        return f"group {ranks_text(self.members)}"


class RankHandle:
    """Live rank as its communications know it: number, compute speed of its GPUs, trace."""

    __slots__ = ("_posted", "rank", "rank_trace", "sm_shares")

    def __init__(self, rank: int, sm_shares: SmShares, rank_trace: RankTrace) -> None:
        self.rank, self.sm_shares, self.rank_trace = rank, sm_shares, rank_trace
        self._posted = 0

    def order(self) -> Order:
        """Return the order of the next communication that the rank posts."""
        self._posted += 1
        return self.rank, self._posted


def ranks_text(ranks: Sequence[int]) -> str:
    """Format ranks: ``[0..7]``, ``[0, 8 .. 56]``, or the first of them."""
    if len(ranks) > 2:
        stride = ranks[1] - ranks[0]
        if stride > 0 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, stride)):
            return f"[{ranks[0]}..{ranks[-1]}]" if stride == 1 else f"[{ranks[0]}, {ranks[1]} .. {ranks[-1]}]"
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"[{shown}, … {len(ranks)} ranks]" if len(ranks) > 8 else f"[{shown}]"


def who(ranks: Sequence[int]) -> str:
    """Format ranks as the subject of a sentence: ``rank 3`` or ``ranks 0, 1 and 5``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:6]))} and {len(ranks) - 6} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


class CollectiveSource(NamedTuple):
    """Source of a collective's values outside its own members.

    Attributes:
        collective: returns it; None if nobody has made its group yet.
        then: calls back when a group has been made.
    """

    collective: Callable[[], Collective | None]
    then: Callable[[Callable[[], None]], None]


class CollectiveCall:
    """Call of a collective by one rank."""

    __slots__ = ("arrived", "code", "comm", "event", "handle", "host", "order", "payload", "root", "size", "stream")

    def __init__(self, handle: RankHandle, stream: Stream, entry: LogRecord) -> None:
        self.handle, self.stream, self.order = handle, stream, handle.order()
        self.code, self.size, self.root = entry.code, entry.c, entry.extra
        self.host, self.payload = entry.host, entry.payload
        self.arrived = False
        self.comm: Collective
        self.event: StreamEvent

    def arrive(self, time: Time) -> None:
        """Mark the rank's stream as arrived."""
        self.arrived = True
        self.handle.rank_trace.reached(self.comm, time)
        self.comm.arrive(time, self.handle.rank)

    def __str__(self) -> str:
        return f"{OPERATIONS[self.code]} #{self.comm.number} of {self.comm.group}"

    def missing(self) -> list[int]:
        """Return the live ranks it waits for."""
        return self.comm.missing()


class Collective:
    """Collective of a group: the calls of its live members.

    Attributes:
        number: which of the group's, from 1.
        parts: the members' calls by world rank; in the group's order once it is complete.
        source: the same collective of another group, in which the rank that stands for this one's root is the root.
    """

    def __init__(self, starts: CommLaunches, group: CommGroup, number: int) -> None:
        self.group, self.number = group, number
        self.parts: dict[int, CollectiveCall] = {}
        self.source: CollectiveSource | None = None
        self._splits: dict[int, tuple[int, ...]] = {}
        self._starts = starts
        self._arrived, self._latest = 0, 0
        self._askers: list[Callable[[], None]] = []

    def post(self, part: CollectiveCall, splits: tuple[int, ...] | None) -> None:
        """Add a live member's call; Disagreement if it is the last, and they are not the same."""
        self.parts[part.handle.rank] = part
        part.comm, part.event = self, StreamEvent(comm=self)
        if splits is not None:
            self._splits[part.handle.rank] = splits
        if self.complete():
            del self.group.pending[self.number]
            self.check()
            self.parts = {rank: self.parts[rank] for rank in self.group.live}
            if self.group.kept is not None and part.code in ROOTED:
                self.group.kept[self.number] = self
            if self._splits and self.group.exchanged is not None:
                self._note_busiest(self.group.exchanged)
            askers, self._askers = self._askers, []
            for asker in askers:
                asker()

    def complete(self) -> bool:
        """Return whether all records are there."""
        return len(self.parts) == len(self.group.live)

    def arrive(self, time: Time, rank: int) -> None:
        """Mark the stream of ``rank`` as arriving at ``time``; begin when it is the last."""
        now = self._starts.world.now()
        if time < now:
            raise late(rank, "a collective", time, now)
        self._arrived += 1
        self._latest = max(self._latest, time)
        if self._arrived == len(self.group.live):
            order = min(part.order for part in self.parts.values())
            self._starts.at(self._latest, PendingComm(order, self.request(), self.begin, self.end))

    def begin(self) -> None:
        """Mark the collective as begun on all members."""
        now = self._starts.world.now()
        for part in self.parts.values():
            part.handle.rank_trace.began(self, now)
            part.handle.sm_shares.of(part.stream.number).communication(1)

    def request(self) -> CollectiveRequest:
        """Return the arguments of the network's collective."""
        parts, members = self.parts, self.group.members
        splits = self._rows() if self._splits else None
        any_part = next(iter(parts.values()))
        return CollectiveRequest(OPERATIONS[any_part.code], max(part.size for part in parts.values()), members, splits)

    def _rows(self) -> dict[int, tuple[int, ...]]:
        """Return the bytes that each live member of an uneven all-to-all sends to each member.

        A member may have told the rows of all, one after the other.
        """
        count = len(self.group.members)
        for told in self._splits.values():
            if len(told) == count**2 > 1:
                return {rank: told[place * count :][:count] for place, rank in enumerate(self.group.members)}
        return {rank: (part.size // count,) * count for rank, part in self.parts.items()} | self._splits

    def _note_busiest(self, exchanged: list[float]) -> None:
        """Note what the busiest member sends or receives, over the mean, where the rows of all are known."""
        rows = list(self._rows().values())
        total = sum(map(sum, rows))
        if len(rows) == len(self.group.members) > 1 and total:
            busiest = max(*map(sum, rows), *map(sum, zip(*rows, strict=True)))
            exchanged.append(busiest * len(rows) / total)

    def end(self) -> None:
        """Mark the collective as over, and let the members' streams go on."""
        now = self._starts.world.now()
        for part in self.parts.values():
            part.handle.sm_shares.of(part.stream.number).communication(-1)
            part.handle.rank_trace.ended(
                self, now, part.stream.number, OPERATIONS[part.code], part.size, self.group.members, part.host
            )
        for part in self.parts.values():
            part.event.happen(now)
            del part.event, part.comm  # No cycle stays behind: it would live until the collector comes by.
            part.stream.resume(now)

    def values(self) -> bytes | None:
        """Return the answer to `VALUES`; None until all records are there."""
        if not self.complete():
            return None
        givers = self._givers()
        payloads = {rank: self.parts[rank].payload for rank in givers}
        if self.source is not None:
            there = self.source.collective()
            if there is None or not there.complete():
                return None
            payloads = dict.fromkeys(givers, there.parts[there._givers()[0]].payload)
        if not all(payloads.values()):
            return b""
        group, answer = self.group, bytearray()
        if group.stand_ins:
            answer += CONTRIBUTION.pack(0, 0, len(group.stand_ins)) + group.stand_ins
        for rank in group.live:
            payload = payloads.get(rank, b"")
            answer += CONTRIBUTION.pack(group.index[rank], group.weights[rank], len(payload)) + payload
        return bytes(answer)

    def sourced(self) -> Time:
        """Return when the members of `source` had called it, 0 without one; only after `values` has answered."""
        there = None if self.source is None else self.source.collective()
        return 0 if there is None else max(part.host for part in there.parts.values())

    def then(self, call: Callable[[], None]) -> None:
        """Call ``call`` when all records are there."""
        if not self.complete() or self.source is None:
            self._askers.append(call)
        elif (there := self.source.collective()) is None:
            self.source.then(call)
        else:
            there.then(call)

    def missing(self) -> list[int]:
        """Return the live ranks whose streams have not reached the collective."""
        return [rank for rank in self.group.live if rank not in self.parts or not self.parts[rank].arrived]

    def unposted(self) -> list[int]:
        """Return the live ranks whose records are not there."""
        return [rank for rank in self.group.live if rank not in self.parts]

    def __str__(self) -> str:
        any_part = next(iter(self.parts.values()))
        return str(any_part)

    def check(self) -> None:
        """Raise Disagreement unless all calls so far are the same."""
        calls: dict[tuple[int, int, int], list[int]] = {}
        for rank, part in self.parts.items():
            calls.setdefault((part.code, 0 if self._splits else part.size, part.root), []).append(rank)
        if len(calls) > 1:
            raise self._disagreement(calls)

    def _disagreement(self, calls: dict[tuple[int, int, int], list[int]]) -> Disagreement:
        lines: list[str] = []
        for (code, size, root), ranks in sorted(calls.items(), key=lambda item: min(item[1])):
            ranks.sort()
            call = "call" if len(ranks) > 1 else "calls"
            root_text = f", root {root}" if root else ""
            at = format_time(self.parts[ranks[0]].host)
            lines.append(f"  - {who(ranks)} {call} {OPERATIONS[code]} of {size:,} B{root_text}, {at} after the start")
        return Disagreement(
            "\n".join(
                [
                    f"collective #{self.number} of {self.group} is not the same on all its ranks:",
                    *lines,
                    "all members of a group must call the same collectives in the same order; look for a branch "
                    "that only some ranks take",
                ]
            )
        )

    def _givers(self) -> tuple[int, ...]:
        """Return the live members that contribute to the result."""
        any_part = next(iter(self.parts.values()))
        if any_part.code not in ROOTED:
            return self.group.live
        return (self.group.stand_in(self.group.members[any_part.root]),)
