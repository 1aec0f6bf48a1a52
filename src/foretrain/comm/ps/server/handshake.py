"""Server's side of the handshake: a worker proves that it knows the job's secret; see `foretrain.comm.ps.session`."""

from __future__ import annotations

import time
from hmac import compare_digest
from typing import Final, NamedTuple

from foretrain.comm.coordinator.handshake import NONCE_SIZE, PROOF_SIZE, nonce
from foretrain.comm.ps.frames import FrameKind, Malformed
from foretrain.comm.ps.session import NAME_SIZE, AuthenticatedSession, session_proof, untagged

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
