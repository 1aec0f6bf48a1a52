"""Who comes to a server says who it is, and proves that it knows the job's secret; see `foretrain.server.sessions`."""

from __future__ import annotations

import hmac
import time
from typing import Final, NamedTuple

from foretrain.server.frames import Kind, Malformed
from foretrain.server.sessions import NONCE_SIZE, Session, nonce, proof, untagged

_HANDSHAKE: Final = 5.0
"""Seconds to say who one is."""
_STRANGERS: Final = 64
"""Connections that may be saying who they are at once, beyond twice the workers, who may all come together."""


class _Stranger(NamedTuple):
    rank: int
    theirs: bytes
    ours: bytes
    deadline: float


class Door:
    """Of one shard.

    Args:
        secret: the job's.
        shard: the server's number.
        workers: N.
    """

    def __init__(self, secret: bytes, shard: int, workers: int) -> None:
        self._secret, self._shard, self._workers = secret, shard, workers
        self._strangers: dict[bytes, _Stranger] = {}

    def challenge(self, route: bytes, rank: int, payload: bytes) -> list[bytes]:
        """What to answer to a HELLO of ``rank``; `Malformed` where it is no worker's, or too many come at once."""
        now = time.monotonic()
        self._strangers = {who: each for who, each in self._strangers.items() if each.deadline > now}
        if len(payload) != NONCE_SIZE or not 0 <= rank < self._workers:
            raise Malformed("hello", f"HELLO of {rank} with {len(payload)} bytes")
        if len(self._strangers) >= _STRANGERS + 2 * self._workers:
            raise Malformed("crowd", f"more than {len(self._strangers)} say who they are at once")
        ours = nonce()
        self._strangers[route] = _Stranger(rank, payload, ours, now + _HANDSHAKE)
        return untagged(Kind.CHALLENGE, self._shard, ours)

    def admit(self, route: bytes, payload: bytes) -> tuple[int, tuple[Session, Session], list[bytes]]:
        """Who has sent a PROOF, the sessions that begin there and aside, and what to answer.

        Raises:
            Malformed: it proves nothing.
        """
        stranger = self._strangers.pop(route, None)
        if stranger is None or stranger.deadline < time.monotonic():
            raise Malformed("proof", "PROOF without HELLO, or too late")
        said = (stranger.rank, self._shard, stranger.theirs, stranger.ours)
        if not hmac.compare_digest(payload, proof(self._secret, "worker", *said)):
            raise Malformed("secret", f"worker {stranger.rank} does not know the job's secret")
        here, aside = (Session(self._secret, *said, serves=True, aside=aside) for aside in (False, True))
        return stranger.rank, (here, aside), untagged(Kind.WELCOME, self._shard, proof(self._secret, "server", *said))
