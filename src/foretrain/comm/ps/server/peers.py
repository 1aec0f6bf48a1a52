"""Workers of a server: the handshake that admits them, their two connections, and the queue of values for each.

In the handshake a worker proves that it knows the job's secret; see `foretrain.comm.ps.session`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from hmac import compare_digest
from typing import Final, NamedTuple

from foretrain.comm.coordinator.handshake import NONCE_SIZE, PROOF_SIZE, nonce
from foretrain.comm.ps.frames import ASIDE, SMALL, FrameKind, Header, Malformed
from foretrain.comm.ps.server.shard import Value
from foretrain.comm.ps.session import NAME_SIZE, AuthenticatedSession, Rejected, session_proof, untagged

_HANDSHAKE_TIMEOUT: Final = 5.0
"""Seconds."""
_REASON_SIZE: Final = 4000
"""Most bytes of a refusal's reason."""
_PENDING_LIMIT: Final = 64
"""Handshakes at once, beyond twice the workers, which may all connect together."""


class _PendingPeer(NamedTuple):
    rank: int
    theirs: bytes
    ours: bytes
    deadline: float


class AuthenticatedPeer(NamedTuple):
    """Worker that has proved its identity and may still be refused; ``theirs`` and ``ours`` are the nonces."""

    rank: int
    shard: int
    job: str
    theirs: bytes
    ours: bytes

    def sessions(self, secret: bytes) -> tuple[AuthenticatedSession, AuthenticatedSession]:
        """Return the sessions of its first and second connection."""
        identity = (self.rank, self.shard, self.theirs, self.ours)
        first = AuthenticatedSession(secret, *identity, serves=True)
        return first, AuthenticatedSession(secret, *identity, serves=True, aside=True)

    def welcome(self, secret: bytes) -> list[bytes]:
        """Return the answer that admits it."""
        shown = session_proof(secret, "server", self.rank, self.shard, self.theirs, self.ours)
        return untagged(FrameKind.WELCOME, self.shard, shown)

    def refusal(self, secret: bytes, flag: int, why: str) -> list[bytes]:
        """Return the answer that refuses it."""
        text = why.encode()[:_REASON_SIZE]
        shown = session_proof(secret, "refusal", self.rank, self.shard, self.theirs, self.ours, bytes((flag,)) + text)
        return untagged(FrameKind.REFUSED, self.shard, shown + text, flag)


class ServerHandshake:
    """Pending handshakes of one shard with N ``workers``."""

    def __init__(self, secret: bytes, shard: int, workers: int) -> None:
        self._secret, self._shard, self._workers = secret, shard, workers
        self._pending: dict[bytes, _PendingPeer] = {}

    def challenge(self, route: bytes, rank: int, payload: bytes) -> list[bytes]:
        """Return the answer to a HELLO of ``rank``; raise `Malformed` if it holds no nonce."""
        now = time.monotonic()
        self._pending = {peer: each for peer, each in self._pending.items() if each.deadline > now}
        if len(payload) != NONCE_SIZE:
            raise Malformed("hello", f"HELLO of {rank} with {len(payload)} bytes")
        if len(self._pending) >= _PENDING_LIMIT + 2 * self._workers:
            # The oldest is the least likely to be a worker; it may send HELLO again.
            self._pending.pop(next(iter(self._pending)))
        ours = nonce()
        self._pending.pop(route, None)
        self._pending[route] = _PendingPeer(rank, payload, ours, now + _HANDSHAKE_TIMEOUT)
        return untagged(FrameKind.CHALLENGE, self._shard, ours)

    def verify(self, route: bytes, payload: bytes) -> AuthenticatedPeer:
        """Return the peer that has sent a PROOF; raise `Malformed` if it is wrong or late."""
        candidate = self._pending.pop(route, None)
        if candidate is None or candidate.deadline < time.monotonic():
            raise Malformed("proof", "PROOF without HELLO, or too late")
        shown, name = payload[:PROOF_SIZE], payload[PROOF_SIZE:]
        identity = (candidate.rank, self._shard, candidate.theirs, candidate.ours)
        if not compare_digest(shown, session_proof(self._secret, "worker", *identity, name)):
            raise Malformed("secret", f"worker {candidate.rank} does not know the job's secret")
        if len(name) > NAME_SIZE or not name.isascii():
            raise Malformed("name", f"worker {candidate.rank} names its job with {len(name)} bytes")
        return AuthenticatedPeer(candidate.rank, self._shard, name.decode(), candidate.theirs, candidate.ours)


@dataclass(slots=True, eq=False)
class Peer:
    """Worker that has proved its identity.

    Attributes:
        rank: its number.
        route: of its first connection, on which the handshake ran.
        session: of the first connection.
        beside: session of the second connection, see `foretrain.comm.ps.frames.ASIDE`.
        send_queue: values to send.
        heard: time of its last message, s of the monotonic clock.
        aside: route of the second connection; None before its first message.
        gone: time at which its connection was found broken.
        epoch: number of its declarations before the present one; None before there is one.
        pushes: messages with pushes that have arrived since the declaration.
        acknowledged: number of them with an answer.
    """

    rank: int
    route: bytes
    session: AuthenticatedSession
    beside: AuthenticatedSession
    send_queue: SendQueue
    heard: float
    aside: bytes | None = None
    gone: float | None = None
    epoch: int | None = None
    pushes: int = 0
    acknowledged: int = 0

    def declares(self, epoch: int) -> None:
        """Note a new declaration, which all later pushes belong to."""
        self.epoch, self.pushes, self.acknowledged = epoch, 0, 0

    def sealed(self, header: Header, payload: bytes | memoryview) -> list[bytes | memoryview]:
        """Return the route, then the frames, of a message."""
        if self.aside is not None and header.kind in ASIDE:
            return [self.aside, self.beside.seal(header, payload), payload]
        return [self.route, self.session.seal(header, payload), payload]


class Peers:
    """Admitted workers, by rank and by route."""

    def __init__(self) -> None:
        self._of_rank: dict[int, Peer] = {}
        self._of_route: dict[bytes, Peer] = {}
        self._past: set[bytes] = set()
        """Routes of workers that have left, whose earlier messages may still arrive on the second connection."""

    def __iter__(self) -> Iterator[Peer]:
        return iter(tuple(self._of_rank.values()))

    @property
    def ranks(self) -> frozenset[int]:
        """Return the ranks of all present workers."""
        return frozenset(self._of_rank)

    def of_rank(self, rank: int) -> Peer | None:
        """Return the worker of that rank."""
        return self._of_rank.get(rank)

    def of_route(self, route: bytes) -> Peer | None:
        """Return the worker of that connection."""
        return self._of_route.get(route)

    def add(self, peer: Peer) -> bool:
        """Admit ``peer``; return whether it has reconnected, and so lacks all values that were in flight to it."""
        before = self.drop(peer.rank)
        self._of_rank[peer.rank] = self._of_route[peer.route] = peer
        return before is not None

    def drop(self, rank: int, *, left: bool = False) -> Peer | None:
        """Remove worker ``rank``; ``left``: because it has closed."""
        peer = self._of_rank.pop(rank, None)
        for route in (peer.route, peer.aside) if peer else ():
            if route is not None:
                self._of_route.pop(route, None)
                if left:
                    self._past.add(route)
        return peer

    def hear(self, route: bytes, header: Header, tag: bytes, payload: memoryview) -> Peer | None:
        """Return the sender of a message; None if it has left and the message is late.

        Raises:
            Malformed: the sender was not admitted ("stranger").
            Rejected: it is not the next of its session.
        """
        peer = self._of_route.get(route)
        if peer is None:
            if route in self._past:
                return None
            peer = self._second_connection(route, header, tag, payload)
        else:
            (peer.beside if route == peer.aside else peer.session).open(header, tag, payload)
        peer.heard, peer.gone = time.monotonic(), None
        return peer

    def _second_connection(self, route: bytes, header: Header, tag: bytes, payload: memoryview) -> Peer:
        """Return the worker whose second connection begins with this message."""
        peer = self._of_rank.get(header.sender)
        if peer is None:
            raise Malformed("stranger", f"{header.kind.name} from whom nobody has let in")
        if peer.aside is not None:
            raise Rejected("tag", f"{header.kind.name} of {header.sender} on a third connection")
        peer.beside.open(header, tag, payload)
        peer.aside = route
        self._of_route[route] = peer
        return peer


class SendQueue:
    """Values to send to one worker: the most urgent first, as far as the worker's credit allows.

    Args:
        credit: bytes in flight from which on nothing more is sent.
        slice_size: most bytes of a message.
    """

    def __init__(self, credit: int, slice_size: int) -> None:
        self._credit, self._slice = credit, slice_size
        self._heap: list[tuple[int, int, Value]] = []
        self._count = 0
        self.under_way = 0

    def put(self, urgency: int, value: Value) -> None:
        """Add ``value``; smaller ``urgency`` goes first, equal ones in the order of adding."""
        self._count += 1
        heappush(self._heap, (urgency, self._count, value))

    def take(self) -> list[Value]:
        """Return the values of the next message; none while the credit is used up or the queue is empty.

        A small value is followed by the next in order while they are small and of the same round.
        """
        if not self._heap or self.under_way >= self._credit:
            return []
        values = [self._pop()]
        size = _length(values[0])
        small = size <= SMALL
        while small and self._heap and self._goes_with(values[0], self._slice - size):
            values.append(self._pop())
            size += _length(values[-1])
        self.under_way += size
        return values

    def _goes_with(self, first: Value, room: int) -> bool:
        following = self._heap[0][2]
        return following.step == first.step and _length(following) <= min(SMALL, room)

    def _pop(self) -> Value:
        urgency, count, value = heappop(self._heap)
        if value.data is None or len(value.data) <= self._slice:
            return value
        # Parameters may be wider than the gradients whose bytes are counted.
        wide = len(value.data) // (value.end - value.start)
        cut, size = value.start + self._slice // wide, self._slice // wide * wide
        heappush(self._heap, (urgency, count, value._replace(start=cut, data=value.data[size:])))
        return value._replace(end=cut, data=value.data[:size])

    def received(self, size: int) -> None:
        """Note that the worker has received ``size`` more bytes."""
        self.under_way = max(0, self.under_way - size)


def _length(value: Value) -> int:
    return 0 if value.data is None else len(value.data)
