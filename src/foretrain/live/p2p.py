"""Messages between two ranks of a group: sends and receives match in their order.

# Note [Messages and folding]
A message one end of which is on a represented rank is matched among the representatives of its ends, in the groups of
the same family: in a ring of symmetric ranks the live one sends to its successor and receives from itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from foretrain.errors import Disagreement
from foretrain.live.collectives import CommGroup, RankHandle
from foretrain.live.event_log import CONTRIBUTION, LogRecord
from foretrain.live.folding import Folding
from foretrain.live.network_traffic import CommLaunches, PendingComm
from foretrain.live.streams import Stream, StreamEvent, late
from foretrain.units import Time

Channel: TypeAlias = tuple[object, int, int]
"""Group, or family where an end is not executed; source and target, or their representatives."""


class P2PBatch:
    """Messages of one NCCL group on one rank.

    They proceed together: the stream waits until the last has ended, and the events of all happen then.
    """

    __slots__ = ("ends", "handle", "host", "left", "stream")

    def __init__(self, handle: RankHandle, stream: Stream) -> None:
        self.handle, self.stream = handle, stream
        self.host: Time = 0
        self.ends: list[P2PEndpoint] = []
        self.left = 0

    def arrive(self, time: Time) -> None:
        """Mark the stream as arrived at all messages of the batch."""
        self.left = len(self.ends)
        for end in self.ends:
            end.arrive(time)

    def end_of_one(self, now: Time) -> None:
        """Count one of the messages as over; with the last, let the stream go on."""
        self.left -= 1
        if not self.left:
            ends, self.ends = self.ends, []
            for end in ends:
                end.event.happen(now)
                del end.event  # No cycle stays behind: it would live until the collector comes by.
            self.stream.resume(now)

    def __str__(self) -> str:
        return " and ".join(str(end) for end in self.ends if not end.begun)

    def missing(self) -> list[int]:
        """Return the live ranks it waits for."""
        return sorted({end.other for end in self.ends if not end.begun and not end.other_has_come()})


class P2PEndpoint:
    """Endpoint of a message: its send or its receive, on one rank.

    Attributes:
        peer: the rank at the other end, as the script says.
        other: the live rank that does what ``peer`` would do.
        number: which of those that this rank sends to (or receives from) the peer in the group, from 1.
        event: the end of the batch.
    """

    def __init__(self, batch: P2PBatch, group: CommGroup, entry: LogRecord, other: int, number: int) -> None:
        self.batch, self.group, self.other, self.number = batch, group, other, number
        self.peer, self.sends = group.members[entry.extra], not entry.code
        self.size, self.payload = entry.c, entry.payload
        self.order = batch.handle.order()
        self.event = StreamEvent(comm=self)
        self.message: P2PTransfer | None = None
        self.arrived: Time | None = None
        self.begun = False
        self._sent: bytes | None = None
        self._askers: list[Callable[[], None]] = []

    def arrive(self, time: Time) -> None:
        """Mark this end as arrived."""
        self.arrived = time
        self.batch.handle.rank_trace.reached(self, time)
        if self.message is not None:
            self.message.try_to_begin()

    def match(self, message: P2PTransfer) -> None:
        """Match this end with the other, which has been posted."""
        self.message, self._sent = message, message.sender.payload
        askers, self._askers = self._askers, []
        for asker in askers:
            asker()

    def begin(self, now: Time) -> None:
        """Mark the message as begun on this end."""
        self.begun = True
        self.batch.handle.rank_trace.began(self, now)
        self.batch.handle.sm_shares.of(self.batch.stream.number).communication(1)

    def finish(self, now: Time, ends: tuple[int, int]) -> None:
        """Mark the message as over on this end."""
        handle, stream, name = self.batch.handle, self.batch.stream.number, "send" if self.sends else "recv"
        self.message = None
        handle.sm_shares.of(stream).communication(-1)
        handle.rank_trace.ended(self, now, stream, name, self.size, ends, self.batch.host)
        self.batch.end_of_one(now)

    def values(self) -> bytes | None:
        """Return the answer to `VALUES`, the bytes that are sent; None until the other end has been posted."""
        payload = self._sent
        if payload is None:
            return None
        source = self.batch.handle.rank if self.sends else self.peer
        return CONTRIBUTION.pack(self.group.index[source], 1, len(payload)) + payload if payload else b""

    def then(self, call: Callable[[], None]) -> None:
        """Call ``call`` when the other end has been posted."""
        self._askers.append(call)

    def unposted(self) -> list[int]:
        """Return the live rank that has not posted the other end, if it has not."""
        return [self.other] if self._sent is None else []

    def other_has_come(self) -> bool:
        """Return whether the other end's stream has arrived."""
        return self.message is not None and self.message.opposite(self).arrived is not None

    def __str__(self) -> str:
        what = f"send #{self.number} to" if self.sends else f"recv #{self.number} from"
        return f"{what} rank {self.peer}"


class P2PTransfer:
    """A send and its receive."""

    __slots__ = ("_starts", "receiver", "sender")

    def __init__(self, starts: CommLaunches, sender: P2PEndpoint, receiver: P2PEndpoint) -> None:
        self.sender, self.receiver, self._starts = sender, receiver, starts
        if sender.size != receiver.size:
            source, target = sender.batch.handle.rank, receiver.batch.handle.rank
            raise Disagreement(
                f"rank {source} calls {sender} with {sender.size:,} B, but rank {target} calls {receiver} with "
                f"{receiver.size:,} B in {sender.group}; both must be of the same size and type"
            )

    def opposite(self, end: P2PEndpoint) -> P2PEndpoint:
        """Return the other end."""
        return self.receiver if end is self.sender else self.sender

    def try_to_begin(self) -> None:
        """Begin when the later end arrives, if both times are known."""
        sent, received = self.sender.arrived, self.receiver.arrived
        if sent is None or received is None:
            return
        when, now = max(sent, received), self._starts.world.now()
        if when < now:
            raise late(self.sender.batch.handle.rank, "a message", when, now)
        transfer = self.sender.batch.handle.rank, self.sender.peer, self.sender.size
        self._starts.at(when, PendingComm(self.sender.order, transfer, self.begin, self.end))

    def begin(self) -> None:
        """Mark both ends as begun."""
        now = self._starts.world.now()
        self.sender.begin(now)
        self.receiver.begin(now)

    def end(self) -> None:
        """Mark both ends as over."""
        now = self._starts.world.now()
        ends = (self.sender.batch.handle.rank, self.sender.peer)
        self.sender.finish(now, ends)
        self.receiver.finish(now, ends)


class P2PMatcher:
    """Unmatched sends and receives; see Note [Messages and folding].

    Attributes:
        unfolded: messages with ranks that should be live: source, target, and the group they are addressed in.
        first: of each rank the first batch, and whether it sends and receives.
        peers: pairs of live ranks between which there are messages.
    """

    def __init__(self, starts: CommLaunches, folding: Folding) -> None:
        self._starts, self._folding = starts, folding
        self._unmatched: dict[Channel, tuple[deque[P2PEndpoint], deque[P2PEndpoint]]] = {}
        self._counts: dict[tuple[CommGroup, int, int, bool], int] = {}
        self.unfolded: list[tuple[int, int, tuple[int, ...]]] = []
        self.first: dict[int, tuple[P2PBatch, set[bool]]] = {}
        self.peers: set[tuple[int, int]] = set()

    def pipelined(self) -> list[tuple[int, int]]:
        """Return pairs of ranks that are stages of a pipeline; those of a ring first send and receive at once."""
        return [
            pair
            for pair in sorted(self.peers)
            if all(len(self.first[rank][1]) == 1 for rank in pair if rank in self.first)
        ]

    def post(self, batch: P2PBatch, group: CommGroup, entry: LogRecord) -> P2PEndpoint:
        """Add a send or receive of ``batch``'s rank, and match it with the other end if that was posted."""
        rank, peer, sends = batch.handle.rank, group.members[entry.extra], not entry.code
        other = self._folding.representative(peer)
        self.peers.add((rank, other))
        batch_of_rank, directions = self.first.setdefault(rank, (batch, set()))
        if batch is batch_of_rank:
            directions.add(sends)
        counted = (group, rank, peer, sends)
        number = self._counts[counted] = self._counts.get(counted, 0) + 1
        end = P2PEndpoint(batch, group, entry, other, number)
        if other != peer and not self._folding.final:
            self.unfolded.append((rank, peer, group.members) if sends else (peer, rank, group.members))
            return end  # It never matches: the ranks start again.
        place = group if other == peer else group.family
        channel = (place, rank, other) if sends else (place, other, rank)
        sent, received = self._unmatched.setdefault(channel, (deque(), deque()))
        mine, theirs = (sent, received) if sends else (received, sent)
        if not theirs:
            mine.append(end)
            return end
        opposite = theirs.popleft()
        message = P2PTransfer(self._starts, end, opposite) if sends else P2PTransfer(self._starts, opposite, end)
        end.match(message)
        opposite.match(message)
        return end
