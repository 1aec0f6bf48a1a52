"""Workers of a server: the handshake that admits them, their two connections, and the queue of values for each.

In the handshake a worker proves that it knows the job's secret; see `foretrain.comm.ps.frames`. Connections are known
by their numbers in a `foretrain.comm.ps.wire.Wire`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from hmac import compare_digest
from typing import NamedTuple

from foretrain.comm.coordinator.handshake import NONCE_SIZE, PROOF_SIZE, nonce
from foretrain.comm.ps.frames import (
    ASIDE,
    BESIDE,
    NAME_SIZE,
    REASON_SIZE,
    SMALL,
    FrameKind,
    Handshake,
    Header,
    Malformed,
)
from foretrain.comm.ps.server.shard import Value


class AuthenticatedPeer(NamedTuple):
    """Worker that has proved its identity on a connection, and may still be refused.

    Attributes:
        known: its handshake.
        job: the job's name; empty on a second connection.
        first: nonces of its first connection, if this is the second; else empty.
    """

    known: Handshake
    job: str = ""
    first: bytes = b""

    @property
    def rank(self) -> int:
        """Return the worker's rank."""
        return self.known.rank

    def welcome(self, secret: bytes) -> tuple[Header, bytes]:
        """Return the answer that admits it."""
        shown = self.known.proof(secret, "server")
        return Header(FrameKind.WELCOME, size=len(shown)), shown

    def refusal(self, secret: bytes, flag: int, why: str) -> tuple[Header, bytes]:
        """Return the answer that refuses it."""
        text = why.encode()[:REASON_SIZE]
        shown = self.known.proof(secret, "refusal", bytes((flag,)) + text)
        return Header(FrameKind.REFUSED, flag, size=len(shown + text)), shown + text


class ServerHandshake:
    """Pending handshakes of one shard."""

    def __init__(self, secret: bytes, shard: int) -> None:
        self._secret, self._shard = secret, shard
        self._pending: dict[int, tuple[Handshake, bool]] = {}

    def challenge(self, route: int, rank: int, flag: int, payload: bytes) -> tuple[Header, bytes]:
        """Return the answer to a HELLO of ``rank``; raise `Malformed` if it holds no nonce."""
        if len(payload) != NONCE_SIZE:
            raise Malformed("hello", f"HELLO of {rank} with {len(payload)} bytes")
        ours = nonce()
        self._pending[route] = Handshake(rank, self._shard, payload, ours), bool(flag & BESIDE)
        return Header(FrameKind.CHALLENGE, size=len(ours)), ours

    def verify(self, route: int, payload: bytes) -> AuthenticatedPeer:
        """Return the peer that has sent a PROOF; raise `Malformed` if it is wrong."""
        known, beside = self._pending.pop(route, (None, False))
        if known is None:
            raise Malformed("proof", "PROOF without HELLO")
        shown, what = payload[:PROOF_SIZE], payload[PROOF_SIZE:]
        role = "worker beside" if beside else "worker"
        if not compare_digest(shown, known.proof(self._secret, role, what)):
            raise Malformed("secret", f"worker {known.rank} does not know the job's secret")
        if len(what) > NAME_SIZE or not (beside or what.isascii()):
            raise Malformed("name", f"worker {known.rank} names its job with {len(what)} bytes")
        return AuthenticatedPeer(known, first=what) if beside else AuthenticatedPeer(known, what.decode())

    def forget(self, route: int) -> None:
        """Drop the handshake of a connection that has closed."""
        self._pending.pop(route, None)


@dataclass(slots=True, eq=False)
class Peer:
    """Worker that has proved its identity.

    Attributes:
        rank: its number.
        route: its first connection.
        nonces: of that connection's handshake.
        send_queue: values to send.
        heard: time of its last message, s of the monotonic clock.
        aside: its second connection, for the messages in `foretrain.comm.ps.frames.ASIDE`; None before there is one.
        gone: time at which a connection was found broken; it may come back with two others.
        epoch: number of its declarations before the present one; None before there is one.
        pushes: messages with pushes that have arrived since the declaration.
        acknowledged: number of them with an answer.
        served: whether the wire takes its pushes and sends it sums; then `send_queue` and these counts are not used.
    """

    rank: int
    route: int
    nonces: bytes
    send_queue: SendQueue
    heard: float
    aside: int | None = None
    gone: float | None = None
    epoch: int | None = None
    pushes: int = 0
    acknowledged: int = 0
    served: bool = False

    def declares(self, epoch: int) -> None:
        """Note a new declaration, which all later pushes belong to."""
        self.epoch, self.pushes, self.acknowledged = epoch, 0, 0

    def route_of(self, kind: FrameKind) -> int:
        """Return the connection for a message of ``kind``."""
        return self.aside if self.aside is not None and kind in ASIDE else self.route

    @property
    def routes(self) -> tuple[int, ...]:
        """Return all connections."""
        return (self.route,) if self.aside is None else (self.route, self.aside)


class Peers:
    """Admitted workers, by rank and by connection."""

    def __init__(self) -> None:
        self._of_rank: dict[int, Peer] = {}
        self._of_route: dict[int, Peer] = {}

    def __iter__(self) -> Iterator[Peer]:
        return iter(tuple(self._of_rank.values()))

    @property
    def ranks(self) -> frozenset[int]:
        """Return the ranks of all present workers."""
        return frozenset(self._of_rank)

    def of_rank(self, rank: int) -> Peer | None:
        """Return the worker of that rank."""
        return self._of_rank.get(rank)

    def of_route(self, route: int) -> Peer | None:
        """Return the worker of that connection."""
        return self._of_route.get(route)

    def add(self, peer: Peer) -> bool:
        """Admit ``peer``; return whether it has reconnected, and so lacks all values that were in flight to it."""
        before = self.drop(peer.rank)
        self._of_rank[peer.rank] = self._of_route[peer.route] = peer
        return before is not None

    def attach(self, candidate: AuthenticatedPeer, route: int) -> bool:
        """Add the second connection of a worker; return False if it does not belong to its first, or is a third."""
        peer = self._of_rank.get(candidate.rank)
        if peer is None or peer.aside is not None or not compare_digest(peer.nonces, candidate.first):
            return False
        peer.aside = route
        self._of_route[route] = peer
        return True

    def drop(self, rank: int) -> Peer | None:
        """Remove worker ``rank``."""
        peer = self._of_rank.pop(rank, None)
        for route in peer.routes if peer else ():
            self._of_route.pop(route, None)
        return peer

    def hear(self, route: int) -> Peer | None:
        """Return the sender of a message; None if it has left, or was replaced."""
        peer = self._of_route.get(route)
        if peer is not None:
            peer.heard = time.monotonic()
        return peer

    def disconnect(self, route: int) -> Peer | None:
        """Note that a connection is broken; return its worker."""
        peer = self._of_route.pop(route, None)
        if peer is not None:
            peer.gone = peer.gone or time.monotonic()
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
