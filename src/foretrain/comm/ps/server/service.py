"""Service of one shard: admits workers, receives pushes and sends values.

One thread does everything; while it decides, the kernel's buffers keep links busy. No message of an unauthenticated
peer or a broken worker ends a service: it is rejected, counted and logged.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import socket
import time
from collections import Counter
from typing import Final

from foretrain.comm.coordinator.handshake import PROOF_SIZE
from foretrain.comm.ps.frames import NAME_SIZE, TO_SERVER, FrameKind, Header, Malformed
from foretrain.comm.ps.placement import LIMIT
from foretrain.comm.ps.server.job import ServerConfig, ShardJob, WorkerRefused, refused
from foretrain.comm.ps.server.peers import AuthenticatedPeer, ServerHandshake
from foretrain.comm.ps.wire import Arrival, Payload, Why, Wire
from foretrain.errors import ConfigError, ForetrainError, PeerLost

logger = logging.getLogger("foretrain.comm.ps")

_REMEMBERED_JOBS: Final = 64
_STRANGERS: Final = 64
"""Connections at once whose peers have yet to prove their identities, beyond four for each worker."""
_LINGER: Final = 1.0
"""Seconds for queued messages to leave when a service closes."""


class Service:
    """Service of one shard of a parameter server. Use as a context manager.

    Args:
        host: address of this host to listen on; never all of them.
        secret: the job's.
        terms: settings.
        port: 0 takes a free one.

    Attributes:
        address: host and port to connect to.
        rejected: number of rejected messages, by reason.
    """

    def __init__(self, host: str, secret: bytes, terms: ServerConfig, port: int = 0) -> None:
        if _everywhere(host):
            raise ConfigError("address", host, "means every address of this host", "name one, e.g. 127.0.0.1")
        self._secret, self._terms = secret, terms
        self.rejected: Counter[str] = Counter()
        self._ended: dict[str, str] = {}
        """Ended jobs, with the text that a late worker of each is refused with."""
        self._known: set[int] = set()
        """Connections whose peers have proved their identities."""
        self._stopped = False
        self._handshake = ServerHandshake(secret, terms.shard)
        self._wire = Wire(LIMIT, PROOF_SIZE + NAME_SIZE)
        self._begin()
        try:
            self.address = host, self._wire.listen(host, port, _STRANGERS + 4 * terms.workers)
        except OSError as error:
            self._wire.close()
            what, remedy = f"cannot be listened on ({error.strerror})", "name a free one of this host"
            raise ConfigError("address", f"{host}:{port}", what, remedy) from None

    def _begin(self) -> None:
        """Begin a job without workers."""
        self._job = ShardJob(self._terms, self._hand_over, self._wire)
        self._alone = time.monotonic()

    @property
    def failure(self) -> ForetrainError | None:
        """Return the error that ended the job; None while it lives, and after a good end."""
        return self._job.failure

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; queued messages have a second to leave. Idempotent."""
        self._job.close()
        self._wire.close(_LINGER)

    def stop(self) -> None:
        """Make `run` return soon. For signal handlers and other threads."""
        self._stopped = True

    def run(self, idle: float = math.inf, *, lives_on: bool = False) -> None:
        """Serve until `stop`, or until all workers have left and none has come back for ``idle`` seconds.

        With ``lives_on`` a job that fails makes room for the next one, as when workers are started again.

        Raises:
            PeerLost: a worker is lost, and the job not elastic; all others were told.
            Disagreement: workers do not train the same.
        """
        while not self._stopped:
            if arrived := self._wire.poll(0.1):
                self._turn(arrived)
            try:
                self._job.watch()
            except ForetrainError as error:
                self._job.fail(error)
            if self._job.failure is not None:
                self._wire.flush()  # all are told, even if nobody polls any more
                if not lives_on:
                    raise self._job.failure
                logger.error("server %d: %s", self._terms.shard, self._job.failure)
                self._remember(f"its job has failed: {self._job.failure}")
                self._job.close()
                self._begin()
            if not self._job.over:
                self._alone = time.monotonic()
            elif time.monotonic() - self._alone > idle:
                break

    # ── hearing ──

    def _turn(self, arrived: list[Arrival]) -> None:
        for connection, header, payload, closed in arrived:
            try:
                if header is None:
                    self._closed(connection, closed)
                else:
                    self._hear(connection, header, payload)
            except Malformed as error:
                self._reject(connection, error)
            except ForetrainError as error:
                self._job.fail(error)
            except Exception as error:
                # An error that a worker's message causes ends its job, but not this server.
                logger.exception("server %d", self._terms.shard)
                self._job.fail(PeerLost(f"server {self._terms.shard} failed: {type(error).__name__}: {error}"))
        self._job.flush()

    def _hear(self, route: int, header: Header, payload: memoryview) -> None:
        peer = self._job.peers.hear(route)
        if peer is not None:
            if header.kind not in TO_SERVER or header.kind in (FrameKind.HELLO, FrameKind.PROOF):
                raise Malformed("kind", f"a message of kind {header.kind}, which is not for a server to hear")
            self._job.take(peer, header, payload)
        elif route in self._known:
            pass  # of a worker that has left, or has come back on other connections
        elif header.kind is FrameKind.HELLO:
            self._hand_over(route, *self._handshake.challenge(route, header.sender, header.flag, bytes(payload)))
        elif header.kind is FrameKind.PROOF:
            self._admit(route, self._handshake.verify(route, bytes(payload)))
        else:
            raise Malformed("kind", f"a message of kind {header.kind} before the sender has proved its identity")

    def _closed(self, route: int, why: int | None) -> None:
        self._handshake.forget(route)
        known = route in self._known
        self._known.discard(route)
        peer = self._job.peers.disconnect(route)
        # A known worker is late only in closing its end.
        if why is not None and why < 0 and not (known and why == Why.LATE):
            who = "a connection" if peer is None else f"a connection of worker {peer.rank}"
            self._count(Why(why).name.lower(), f"{who} was closed")
        # Half a worker is none: it makes both connections anew when it sees that one has closed.
        for other in peer.routes if peer is not None else ():
            self._wire.end(other, orderly=True)

    def _admit(self, route: int, candidate: AuthenticatedPeer) -> None:
        """Admit a worker that has proved its identity, or add its second connection."""
        if candidate.first:
            if not self._job.peers.attach(candidate, route):
                raise Malformed("third", f"a second connection of worker {candidate.rank} that belongs to no first")
        else:
            self._admit_first(route, candidate)
        self._hand_over(route, *candidate.welcome(self._secret))
        keys = candidate.known.keys(self._secret)
        self._wire.keys(route, keys.server, keys.worker)
        self._known.add(route)

    def _admit_first(self, route: int, candidate: AuthenticatedPeer) -> None:
        if self._job.over:
            if self._job.lost:
                self._remember("the others went on without it, and have ended")
            self._job.close()
            self._begin()  # this is another
        before = self._job.peers.of_rank(candidate.rank)
        try:
            if candidate.job in self._ended:
                raise refused(PeerLost(self._ended[candidate.job]))
            self._job.admit(candidate, route)
        except WorkerRefused as error:
            self._hand_over(route, *candidate.refusal(self._secret, error.flag, str(error)))
            raise
        for old in before.routes if before is not None else ():
            self._wire.end(old)

    def _remember(self, why: str) -> None:
        if self._job.name is not None:
            self._ended[self._job.name] = why
            if len(self._ended) > _REMEMBERED_JOBS:
                self._ended.pop(next(iter(self._ended)))

    def _count(self, reason: str, what: object) -> None:
        self.rejected[reason] += 1
        count = self.rejected[reason]
        if count < 10 or count & count - 1 == 0:
            logger.warning("rejected (%s, %d so far): %s", reason, count, what)

    def _reject(self, route: int, error: Malformed) -> None:
        self._count(error.reason, error)
        peer = self._job.peers.of_route(route)
        if peer is not None:
            # Authenticated, but malformed.
            self._job.fail(PeerLost(f"worker {peer.rank} sent what makes no sense: {error}"))
            return
        if error.reason == "secret":
            self._hand_over(route, Header(FrameKind.STRANGER), b"")
        self._handshake.forget(route)
        self._wire.end(route, orderly=True)

    def _hand_over(self, route: int, header: Header, payload: Payload) -> bool:
        """Queue a message; return False if the connection is gone."""
        return self._wire.send(route, header, payload, self._terms.shard)


def _everywhere(host: str) -> bool:
    """Return whether ``host`` means all addresses of this host, in any spelling: 0 does, too."""
    if host in ("", "*"):
        return True
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return False  # listening reports the error
    return any(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_unspecified for *_, address in found)
