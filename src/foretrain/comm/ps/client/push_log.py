"""Log of what this worker has pushed, from which it pushes again after a connection or a server was lost.

# Note [Pushing again]
A server answers a declaration with its number. If that is the one it had before, it knows all but what was on its way:
what has not come back is said again, and the server counts once what it hears twice. If it is another, the server was
started anew and knows nothing: it is told all that was pushed in this round. Other workers may be a round behind, and
lack sums of it that can only be made again with what this worker has pushed there; so it is told that, too, unless a
sum of this round has come, which is made when all workers are in it. Until then nothing else is said to that server:
pushes of a round are resent before those of the next, whose sums must have come before a third round is
written over the first.

Where a server keeps more than sums, all rounds are kept that it has not said to be in a snapshot. Started anew it goes
on from the last one, and all rounds since are said again, each when those before are complete there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from foretrain.comm.ps.client.inflight import InFlight
from foretrain.comm.ps.frames import ACCUMULATES, CLOSED, PULL_ONLY, SMALL, STATEFUL, FrameKind, Header, Item, bundle
from foretrain.comm.ps.placement import Declaration, Placement
from foretrain.errors import PeerLost
from foretrain.network.switch_cluster import MESSAGE
from foretrain.tasks import Piece


class PushConnection(Protocol):
    """Interface of `foretrain.comm.ps.client.connection.Connection` to the log."""

    shard: int
    sessions: int

    def send(self, header: Header, payload: bytes | memoryview = b"") -> bool:
        """Send a message; return False without a session."""
        ...


class Copies(Protocol):
    """Interface of `foretrain.plugins.torch.ps.staging.Staging` to the log."""

    declaration: Declaration

    def begin(self, step: int, since: int) -> None:
        """Prepare for round ``step``; forget what was pushed before round ``since``."""
        ...

    def fill(self, task: int, start: int, end: int, step: int) -> memoryview:
        """Copy these bytes of a gradient and return the copy."""
        ...

    def kept(self, task: int, start: int, end: int, step: int) -> memoryview:
        """Return these bytes as they were pushed in round ``step``."""
        ...


class PushedRange(NamedTuple):
    """Bytes ``[start, end)`` of a task."""

    task: int
    start: int
    end: int


class _SentBatch(NamedTuple):
    """Ranges that were pushed together; ``held``: see `PULL_ONLY`."""

    spans: tuple[PushedRange, ...]
    held: bool


class _Rule(NamedTuple):
    """Hyperparameters from round ``since`` on, where optimizers run on the servers."""

    since: int
    text: bytes


class _Round:
    """One round: its number, whether it adds to the last one, the hyperparameters, what was pushed, and which tasks had
    gradients.
    """

    __slots__ = ("again", "rule", "said", "step", "used")

    def __init__(self, step: int, again: bool, rule: _Rule) -> None:
        self.step, self.again, self.rule = step, again, rule
        self.said: list[_SentBatch] = []
        self.used: set[int] = set()


class _ServerState:
    """State of one server as this worker knows it.

    Attributes:
        number: of the one that knows all that was pushed, but for what is on its way.
        sessions: that were begun.
        ready: whether it may be pushed to.
        next: the round to say again next, while it is not.
        keeps: whether it keeps more than sums; before it has said so it may.
        saved: rounds of which it needs no push again.
        closed: whether it will not wait for this worker, were it started anew.
        done: rounds that are complete there.
        lost: in which round it said so of which worker.
        unheard: of each message with pushes of this session that it has not acknowledged the round and what was in it.
        heard: how many it has.
    """

    __slots__ = ("closed", "done", "heard", "keeps", "lost", "next", "number", "ready", "saved", "sessions", "unheard")

    def __init__(self) -> None:
        self.number: int | None = None
        self.next: int | None = None
        self.ready, self.keeps = False, True
        self.sessions = self.saved = self.done = 0
        self.closed = False
        self.lost: dict[int, int] = {}
        self.unheard: deque[tuple[int, list[PushedRange]]] = deque()
        self.heard = 0


class PushLog:
    """Log of one worker's pushes to all servers; see Note [Pushing again].

    Args:
        copies: the gradients as bytes.
        connections: to every shard, by number.
        flights: what has not come back.
        epoch: declarations of this worker before this one.

    Attributes:
        placement: where each byte lives.
        together: whether a sum of this round has come: then all workers are in it.
    """

    def __init__(self, copies: Copies, connections: Sequence[PushConnection], flights: InFlight, epoch: int) -> None:
        self._copies, self._connections, self._inflight, self._epoch = copies, connections, flights, epoch
        self.placement = Placement(copies.declaration, len(connections))
        self.together = False
        self._rounds: deque[_Round] = deque()
        self._servers = [_ServerState() for _ in connections]

    @property
    def step(self) -> int:
        """Return the number of the current round; −1 before the first."""
        return self._rounds[-1].step if self._rounds else -1

    def begin(self, again: bool, rule: bytes = b"") -> None:
        """Begin the next round; ``again``: it adds to the current sums; ``rule``: the hyperparameters to update
        with.
        """
        before, was = self.step, self._rounds[-1].rule if self._rounds else _Rule(0, b"")
        self._rounds.append(_Round(before + 1, again, was if rule == was.text else _Rule(before + 1, rule)))
        if rule != was.text:
            for connection in self._connections:
                self._say_rule(self._rounds[-1], connection)
        since = min([before, *(server.saved for server in self._servers if server.keeps)])
        while self._rounds[0].step < since:
            self._rounds.popleft()
        self._copies.begin(before + 1, self._rounds[0].step)
        self.together = False

    def push(self, spans: Sequence[PushedRange], used: Callable[[int], bool], *, held: bool) -> None:
        """Push these ranges: gradients where a task is ``used``; with ``held`` their sums must be pulled."""
        latest, batch = self._rounds[-1], _SentBatch(tuple(spans), held)
        latest.said.append(batch)
        for task, start, end in batch.spans:
            if used(task):
                latest.used.add(task)
                self._copies.fill(task, start, end, latest.step)
        self._say(latest, batch, self.ready)

    def pull(self, task: int, start: int, end: int) -> None:
        """Ask for the sums of these bytes."""
        self._ask(task, start, end, self.ready)

    def hear(self, connection: PushConnection) -> bool:
        """Declare the tasks if the session is new. Call before handling anything that ``connection`` has read.

        Returns whether it is.
        """
        server = self._servers[connection.shard]
        if connection.sessions == server.sessions:
            return False
        server.sessions = connection.sessions
        server.unheard.clear()
        server.heard = 0
        # There is nothing to say again before the first round: no need to wait for an answer.
        server.ready, server.next = not self._rounds, None
        header = Header(FrameKind.DECLARE, step=self._epoch, offset=self.step + 1)
        connection.send(header, self._copies.declaration.encode())
        for worker, step in server.lost.items():
            connection.send(Header(FrameKind.LOST, part=worker, step=step, offset=self.step))
        if self._rounds:
            self._say_rule(self._rounds[-1], connection)
        return True

    def wanted(self, connection: PushConnection, header: Header) -> None:
        """Handle WANTED: the server has received the declaration, or everything that was pushed again.

        Raises:
            PeerLost: it has lost a state that cannot be made anew.
        """
        server, number = self._servers[connection.shard], header.offset
        server.keeps, server.done = bool(header.flag & STATEFUL), header.step
        if server.ready:
            server.number = number
        elif server.number == number:
            left: tuple[list[PushedRange], list[PushedRange]] = ([], [])
            for task, (start, end, flight) in self._inflight.unanswered():
                left[flight.chunk.op == "reduce_scatter"].append(PushedRange(task, start, end))
            for held, spans in enumerate(left):
                self._say(self._rounds[-1], _SentBatch(tuple(spans), bool(held)), connection.shard.__eq__)
            self._caught_up(connection)
        else:
            server.next = self._first(connection.shard)
            self._catch_up(connection)

    def received(self, connection: PushConnection, header: Header) -> list[PushedRange]:
        """Handle RECEIVED: the server has so many messages of this session; return the newly acknowledged ranges of
        this round.
        """
        server, spans = self._servers[connection.shard], []
        if header.step != self._epoch:
            return spans  # of what was measured before
        while server.unheard and server.heard < header.offset:
            step, some = server.unheard.popleft()
            server.heard += 1
            spans += some if step == self.step else []
        return spans

    def committed(self, connection: PushConnection, header: Header) -> None:
        """Handle COMMITTED: the server has completed or saved rounds."""
        server = self._servers[connection.shard]
        server.saved, server.done, server.closed = header.step, header.offset, bool(header.flag & CLOSED)
        self._catch_up(connection)

    def lose(self, connection: PushConnection, worker: int) -> bool:
        """Note that a server goes on without ``worker``; return whether it is the first server to."""
        first = not any(worker in server.lost for server in self._servers)
        self._servers[connection.shard].lost.setdefault(worker, self.step)
        return first

    def ready(self, shard: int) -> bool:
        """Return whether the server has everything it needs, so that new messages may follow."""
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
        if not server.keeps:
            return self.step if self.together else max(oldest, self.step - 1)
        if min(server.done, self.step) < oldest:
            raise PeerLost(
                f"server {shard} was started anew with the state after {server.done} rounds, and what was pushed "
                f"before round {oldest} is kept nowhere: start servers with --snapshot-dir, on a disk that stays"
            )
        return min(server.done, self.step)

    def _catch_up(self, connection: PushConnection) -> None:
        """Push earlier rounds again, as far as the server can take them now."""
        server, latest = self._servers[connection.shard], self._rounds[-1] if self._rounds else None
        while server.next is not None and (not server.keeps or server.next <= server.done):
            one = self._rounds[server.next - self._rounds[0].step]
            self._say_rule(one, connection)
            for batch in one.said:
                # The sums of rounds before have come here, and are for others.
                self._say(one, batch if one is latest else batch._replace(held=True), connection.shard.__eq__)
            server.next += 1
            if one is latest:
                self._caught_up(connection)

    def _caught_up(self, connection: PushConnection) -> None:
        server = self._servers[connection.shard]
        server.ready, server.next = True, None
        for task, byte_range in self._inflight.unpulled():
            self._ask(task, byte_range.start, byte_range.end, connection.shard.__eq__)
        # It is the one that knows all when it has heard this, and not before: this session may be lost, too.
        connection.send(Header(FrameKind.WANTED))

    def _say_rule(self, one: _Round, connection: PushConnection) -> None:
        if one.rule.text:
            connection.send(Header(FrameKind.RULE, step=one.rule.since, size=len(one.rule.text)), one.rule.text)

    def _say(self, one: _Round, batch: _SentBatch, to: Callable[[int], bool]) -> None:
        flag = (ACCUMULATES if one.again else 0) | (PULL_ONLY if batch.held else 0)
        header = Header(FrameKind.PUSH, flag, step=one.step)
        for shard, spans, items in self._together(one, batch):
            if to(shard) and self._connections[shard].send(*bundle(header, items)):
                self._servers[shard].unheard.append((one.step, spans))

    def _together(self, one: _Round, batch: _SentBatch) -> Iterator[tuple[int, list[PushedRange], list[Item]]]:
        """Yield messages: the shard, the ranges in it, and its items. Small ranges share a message."""
        small: dict[int, tuple[list[PushedRange], list[Item]]] = {}
        for task, start, end in batch.spans:
            used = task in one.used
            data = self._copies.kept(task, start, end, one.step) if used else memoryview(b"")
            for part, offset, size in self.placement.of(Piece(task, start, end - start)):
                low = part.offset + offset
                span = PushedRange(task, low, low + size)
                item = Item(part.number, offset, size, data[low - start : low - start + size])
                if size > SMALL:
                    yield part.shard, [span], [item]
                    continue
                spans, items = small.setdefault(part.shard, ([], []))
                spans.append(span)
                items.append(item)
                if sum(item.size for item in items) > MESSAGE - SMALL:
                    yield part.shard, *small.pop(part.shard)
        for shard, (spans, items) in small.items():
            yield shard, spans, items

    def _ask(self, task: int, start: int, end: int, to: Callable[[int], bool]) -> None:
        for part, offset, size in self.placement.of(Piece(task, start, end - start)):
            if to(part.shard):
                header = Header(FrameKind.PULL, part=part.number, step=self.step, offset=offset, size=size)
                self._connections[part.shard].send(header)
