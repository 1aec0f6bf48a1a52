"""Log of this worker's pushes, from which it resends them after a connection or a server was lost.

# Note [Resent pushes]
A server answers a declaration with its number. If it is the same as before, the server lacks only the messages that
were in flight: pushes without an answer are resent, and the server counts duplicates once. If it is another, the server
was restarted and knows nothing: all pushes of this round are resent. Other workers may be a round behind, and lack sums
of it that need this worker's pushes; so these are resent, too, unless a sum of this round has arrived, which shows that
all workers are in it. Until then no other message goes to that server: pushes of a round are resent before those of the
next, whose sums must have arrived before a third round overwrites the first.

For a stateful server all rounds are kept that are in no snapshot. After a restart it continues from the last one, and
all later rounds are resent, each when those before are complete there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from foretrain.comm.ps.client.inflight import InFlight
from foretrain.comm.ps.frames import ACCUMULATES, CLOSED, PULL_ONLY, STATEFUL, FrameKind, Header
from foretrain.comm.ps.placement import Declaration, Placement
from foretrain.comm.ps.wire import SPAN
from foretrain.errors import PeerLost
from foretrain.tasks import Piece

if TYPE_CHECKING:
    from foretrain.comm.ps.client.connection import Connection


class Copies(Protocol):
    """Gradients of each kept round as bytes."""

    declaration: Declaration

    def begin(self, step: int, since: int) -> None:
        """Prepare for round ``step``; drop copies of rounds before ``since``."""

    def fill(self, task: int, start: int, end: int, step: int) -> None:
        """Copy these bytes of a gradient."""
        ...

    def address(self, task: int, step: int) -> int:
        """Return where the copy of a gradient in round ``step`` is; the memory stays until connections are closed."""
        ...


class PushedRange(NamedTuple):
    """Bytes ``[start, end)`` of a task."""

    task: int
    start: int
    end: int


class _SentBatch(NamedTuple):
    """Ranges that were pushed together; ``held``: with `PULL_ONLY`."""

    spans: tuple[PushedRange, ...]
    held: bool


class _Rule(NamedTuple):
    """Hyperparameters from round ``since`` on, where optimizers run on the servers."""

    since: int
    text: bytes


@dataclass(slots=True)
class _Round:
    """Round ``step``; ``again``: it adds to the sums of the last one; ``used``: the tasks with gradients."""

    step: int
    again: bool
    rule: _Rule
    batches: list[_SentBatch] = field(default_factory=list)
    used: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _ServerState:
    """State of one server as this worker knows it.

    Attributes:
        number: of the server that has all pushes, but for those in flight.
        sessions: number of sessions so far.
        ready: whether new messages may be sent to it.
        next: the round to resend next while it is not ready.
        stateful: whether it keeps more than sums, which is assumed until it answers.
        saved: rounds of which it needs no push again.
        closed: whether it would not wait for this worker after a restart.
        done: rounds that are complete there.
        lost: lost workers, with the round in which it reported each.
    """

    number: int | None = None
    sessions: int = 0
    ready: bool = False
    next: int | None = None
    stateful: bool = True
    saved: int = 0
    closed: bool = False
    done: int = 0
    lost: dict[int, int] = field(default_factory=dict)


class PushLog:
    """Log of one worker's pushes to all servers; see Note [Resent pushes].

    Args:
        copies: the gradients as bytes.
        connections: to every shard, by number.
        flights: bytes in flight.
        epoch: number of this worker's earlier declarations.

    Attributes:
        placement: shard and part of each byte.
        together: whether a sum of this round has arrived, which shows that all workers are in it.
    """

    def __init__(self, copies: Copies, connections: Sequence[Connection], flights: InFlight, epoch: int) -> None:
        self._copies, self._connections, self._inflight, self._epoch = copies, connections, flights, epoch
        self.placement = Placement(copies.declaration, len(connections))
        flights.split(self.placement.parts)
        self.together = False
        self._rounds: deque[_Round] = deque()
        self._servers = [_ServerState() for _ in connections]

    @property
    def step(self) -> int:
        """Return the number of the current round; −1 before the first."""
        return self._rounds[-1].step if self._rounds else -1

    def begin(self, again: bool, rule: bytes = b"") -> None:
        """Begin the next round; ``again``: it adds to the current sums; ``rule``: the encoded hyperparameters."""
        before, was = self.step, self._rounds[-1].rule if self._rounds else _Rule(0, b"")
        self._rounds.append(_Round(before + 1, again, was if rule == was.text else _Rule(before + 1, rule)))
        if rule != was.text:
            for connection in self._connections:
                self._say_rule(self._rounds[-1], connection)
        since = min([before, *(server.saved for server in self._servers if server.stateful)])
        while self._rounds[0].step < since:
            self._rounds.popleft()
        self._copies.begin(before + 1, self._rounds[0].step)
        self.together = False

    def push(self, spans: Sequence[PushedRange], used: Callable[[int], bool], *, held: bool) -> None:
        """Push these ranges: gradients where a task is ``used``; with ``held`` their sums must be pulled."""
        latest, batch = self._rounds[-1], _SentBatch(tuple(spans), held)
        latest.batches.append(batch)
        for task, start, end in batch.spans:
            if used(task):
                latest.used.add(task)
                self._copies.fill(task, start, end, latest.step)
        self._say(latest, batch, (each for each in self._connections if self.ready(each.shard)))

    def pull(self, task: int, start: int, end: int) -> None:
        """Ask for the sums of these bytes."""
        self._ask(task, start, end, self.ready)

    def hear(self, connection: Connection) -> bool:
        """Declare the tasks if the session is new, and return whether it is. Call before handling its messages."""
        server = self._servers[connection.shard]
        if connection.sessions == server.sessions:
            return False
        server.sessions = connection.sessions
        connection.take_answers(self._inflight, self._epoch)
        # Before the first round there is nothing to resend, and no answer to wait for.
        server.ready, server.next = not self._rounds, None
        header = Header(FrameKind.DECLARE, step=self._epoch, offset=self.step + 1)
        connection.send(header, self._copies.declaration.encode())
        for worker, step in server.lost.items():
            connection.send(Header(FrameKind.LOST, part=worker, step=step, offset=self.step))
        if self._rounds:
            self._say_rule(self._rounds[-1], connection)
        return True

    def wanted(self, connection: Connection, header: Header) -> None:
        """Handle WANTED: the server has received the declaration, or all resent pushes.

        Raises:
            PeerLost: it has lost a state that cannot be restored.
        """
        server, number = self._servers[connection.shard], header.offset
        server.stateful, server.done = bool(header.flag & STATEFUL), header.step
        if server.ready:
            server.number = number
        elif server.number == number:
            left: tuple[list[PushedRange], list[PushedRange]] = ([], [])
            for task, (start, end, flight) in self._inflight.unanswered():
                left[flight.chunk.op == "reduce_scatter"].append(PushedRange(task, start, end))
            for held, spans in enumerate(left):
                self._say(self._rounds[-1], _SentBatch(tuple(spans), bool(held)), [connection])
            self._caught_up(connection)
        else:
            server.next = self._first(connection.shard)
            self._catch_up(connection)

    def committed(self, connection: Connection, header: Header) -> None:
        """Handle COMMITTED: the server has completed or saved rounds."""
        server = self._servers[connection.shard]
        server.saved, server.done, server.closed = header.step, header.offset, bool(header.flag & CLOSED)
        self._catch_up(connection)

    def lose(self, connection: Connection, worker: int) -> bool:
        """Note that a server goes on without ``worker``; return whether it is the first server that does."""
        first = not any(worker in server.lost for server in self._servers)
        self._servers[connection.shard].lost.setdefault(worker, self.step)
        return first

    def ready(self, shard: int) -> bool:
        """Return whether the server has all earlier pushes, so that new messages may follow."""
        return self._servers[shard].ready

    def complete(self, shard: int) -> bool:
        """Return whether all rounds are complete at a server that is stateful."""
        server = self._servers[shard]
        return server.ready and server.done > self.step

    def saved(self, shard: int) -> bool:
        """Return whether the server needs neither this worker's pushes nor the worker itself again."""
        server = self._servers[shard]
        return server.closed and server.saved > self.step

    def _first(self, shard: int) -> int:
        """Return the round from which on a restarted server needs all pushes."""
        server, oldest = self._servers[shard], self._rounds[0].step
        if not server.stateful:
            return self.step if self.together else max(oldest, self.step - 1)
        if min(server.done, self.step) < oldest:
            raise PeerLost(
                f"server {shard} was started anew with the state after {server.done} rounds, and what was pushed "
                f"before round {oldest} is kept nowhere: start servers with --snapshot-dir, on a disk that stays"
            )
        return min(server.done, self.step)

    def _catch_up(self, connection: Connection) -> None:
        """Resend earlier rounds, as far as the server can take them now."""
        server, latest = self._servers[connection.shard], self._rounds[-1] if self._rounds else None
        while server.next is not None and (not server.stateful or server.next <= server.done):
            one = self._rounds[server.next - self._rounds[0].step]
            self._say_rule(one, connection)
            for batch in one.batches:
                # The sums of earlier rounds have arrived here, and only other workers need them.
                self._say(one, batch if one is latest else batch._replace(held=True), [connection])
            server.next += 1
            if one is latest:
                self._caught_up(connection)

    def _caught_up(self, connection: Connection) -> None:
        server = self._servers[connection.shard]
        server.ready, server.next = True, None
        for task, byte_range in self._inflight.unpulled():
            self._ask(task, byte_range.start, byte_range.end, connection.shard.__eq__)
        # Its answer shows that it has all pushes: this session may be lost before.
        connection.send(Header(FrameKind.WANTED))

    def _say_rule(self, one: _Round, connection: Connection) -> None:
        if one.rule.text:
            connection.send(Header(FrameKind.RULE, step=one.rule.since, size=len(one.rule.text)), one.rule.text)

    def _say(self, one: _Round, batch: _SentBatch, to: Iterable[Connection]) -> None:
        flag = (ACCUMULATES if one.again else 0) | (PULL_ONLY if batch.held else 0)
        spans = b"".join(
            SPAN.pack(task, start, end, self._copies.address(task, one.step) + start if task in one.used else 0)
            for task, start, end in batch.spans
        )
        for connection in to:
            connection.push(one.step, flag, spans)

    def _ask(self, task: int, start: int, end: int, to: Callable[[int], bool]) -> None:
        for part, offset, size in self.placement.of(Piece(task, start, end - start)):
            if to(part.shard):
                header = Header(FrameKind.PULL, part=part.number, step=self.step, offset=offset, size=size)
                self._connections[part.shard].send(header)
