"""Service of one shard: admits workers on its sockets, receives pushes and sends values.

One thread does everything but the sockets' input and output, which are on ZeroMQ's own thread. No message of an
unauthenticated peer or a broken worker ends a service: it is rejected, counted and logged.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import socket
import time
from collections import Counter
from typing import Any, Final

import zmq

from foretrain.comm.coordinator.handshake import NONCE_SIZE, PROOF_SIZE
from foretrain.comm.ps.frames import TO_SERVER, UNTAGGED, FrameKind, Header, Malformed, unpack
from foretrain.comm.ps.placement import LIMIT
from foretrain.comm.ps.server.job import ServerConfig, ShardJob, WorkerRefused, refused
from foretrain.comm.ps.server.peers import ServerHandshake
from foretrain.comm.ps.session import NAME_SIZE, Rejected, ZapAuth, ZeroCopy, untagged
from foretrain.errors import ConfigError, ForetrainError, PeerLost

logger = logging.getLogger("foretrain.comm.ps")

_BATCH: Final = 1 << 20
"""Bytes to receive before answers are sent."""
_REMEMBERED_JOBS: Final = 64
_MESSAGE_COST: Final = 16 << 10
"""Overhead of a message, as the bytes that could be received in that time, about."""


class Service:
    """Service of one shard of a parameter server. Use as a context manager.

    Args:
        host: address of this host to listen on; never all of them.
        secret: the job's.
        terms: settings.
        port: 0 takes a free one.

    Attributes:
        rejected: number of rejected messages, by reason.
    """

    def __init__(self, host: str, secret: bytes, terms: ServerConfig, port: int = 0) -> None:
        if _everywhere(host):
            raise ConfigError("address", host, "means every address of this host", "name one, e.g. 127.0.0.1")
        self._secret, self._terms = secret, terms
        self.rejected: Counter[str] = Counter()
        self._ended: dict[str, str] = {}
        """Ended jobs, with the text that a late worker of each is refused with."""
        self._stopped = False
        self._handshake = ServerHandshake(secret, terms.shard, terms.workers)
        self._begin()
        self._context, self._zero_copy = zmq.Context(), ZeroCopy()
        self._socket = self._made()
        self._zap = ZapAuth(self._context, secret, self._socket)
        self._poller = zmq.Poller()
        for each in (self._socket, *self._zap.sockets):
            self._poller.register(each, zmq.POLLIN)
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._zap.close()
            self._context.destroy(linger=0)
            self._zero_copy.close()
            what, remedy = f"cannot be listened on ({error})", "name a free one of this host"
            raise ConfigError("address", f"{host}:{port}", what, remedy) from None

    def _begin(self) -> None:
        """Begin a job without workers."""
        self._job = ShardJob(self._terms, self._hand_over)
        self._alone = time.monotonic()

    @property
    def failure(self) -> ForetrainError | None:
        """Return the error that ended the job; None while it lives, and after a good end."""
        return self._job.failure

    def _made(self) -> zmq.Socket[bytes]:
        made = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 1000),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.SNDHWM, 0),  # send queues limit the bytes in flight, and nothing must be dropped
            (zmq.RCVHWM, 64),
            (zmq.MAXMSGSIZE, 2 * LIMIT),  # ZeroMQ closes the connection of a larger message without reading it
            (zmq.SNDBUF, 1 << 20),
        ):
            made.setsockopt(option, value)
        return made

    @property
    def address(self) -> tuple[str, int]:
        """Return the host and port to connect to."""
        host, port = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://").rsplit(":", 1)
        return host, int(port)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close sockets and threads; queued messages have a second to leave. Idempotent."""
        self._job.close()
        if not self._socket.closed:
            self._zap.close()
            self._socket.close()
        self._context.term()
        self._zero_copy.close()

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
            if self._poller.poll(100):
                for rejected in self._zap.answer():
                    self._count("gate", rejected)
                self._turn()
            try:
                self._job.watch()
            except ForetrainError as error:
                self._job.fail(error)
            if self._job.failure is not None:
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

    def _turn(self) -> None:
        heard = 0
        while heard < _BATCH:
            try:
                route, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            heard += _MESSAGE_COST + sum(map(len, frames))
            try:
                self._hear(route.bytes, frames)
            except Malformed as error:
                self._reject(route.bytes, error)
            except ForetrainError as error:
                self._job.fail(error)
            except Exception as error:
                # An error that a worker's message causes ends its job, but not this server.
                logger.exception("server %d", self._terms.shard)
                self._job.fail(PeerLost(f"server {self._terms.shard} failed: {type(error).__name__}: {error}"))
        self._job.flush()

    def _hear(self, route: bytes, frames: list[zmq.Frame]) -> None:
        if not 1 <= len(frames) <= 2:
            raise Malformed("frames", f"a message of {len(frames)} frames")
        if max(map(len, frames)) > LIMIT:
            raise Malformed("oversized", f"a frame of {max(map(len, frames))} bytes, where {LIMIT} is the most")
        header, tag = unpack(frames[0].bytes)
        payload = frames[1].buffer if len(frames) > 1 else memoryview(b"")
        if header.kind not in TO_SERVER:
            raise Malformed("kind", f"{header.kind.name} is not for a server to hear")
        if header.kind in UNTAGGED:
            self._greet(route, header, bytes(payload[: NONCE_SIZE + PROOF_SIZE + NAME_SIZE]))
        elif (peer := self._job.peers.hear(route, header, tag, payload)) is not None:
            self._job.take(peer, header, payload)

    def _greet(self, route: bytes, header: Header, payload: bytes) -> None:
        if header.kind is FrameKind.HELLO:
            self._hand_over(route, self._handshake.challenge(route, header.sender, payload))
            return
        candidate = self._handshake.verify(route, payload)
        if self._job.over:
            if self._job.lost:
                self._remember("the others went on without it, and have ended")
            self._job.close()
            self._begin()  # this is another
        try:
            if candidate.job in self._ended:
                raise refused(PeerLost(self._ended[candidate.job]))
            self._job.admit(candidate, route, candidate.sessions(self._secret))
        except WorkerRefused as error:
            self._hand_over(route, candidate.refusal(self._secret, error.flag, str(error)))
            raise
        self._hand_over(route, candidate.welcome(self._secret))

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

    def _reject(self, route: bytes, error: Malformed) -> None:
        self._count(error.reason, error)
        peer = self._job.peers.of_route(route)
        if error.reason == "stranger":
            self._hand_over(route, untagged(FrameKind.STRANGER, self._terms.shard))
        elif peer is not None and error.reason == "gap":
            # The missing messages were lost with a connection: later ones cannot be told from a replay.
            self._hand_over(route, untagged(FrameKind.STRANGER, self._terms.shard))
            peer.gone = peer.gone or time.monotonic()
        elif peer is not None and not isinstance(error, Rejected):
            # Authenticated, but malformed.
            self._job.fail(PeerLost(f"worker {peer.rank} sent what makes no sense: {error}"))

    def _hand_over(self, route: bytes | memoryview, frames: list[Any]) -> bool:
        """Give frames to the socket; return False if the connection is gone."""
        if not len(frames[-1]):
            frames = frames[:-1]
        try:
            self._socket.send_multipart([route, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True


def _everywhere(host: str) -> bool:
    """Return whether ``host`` means all addresses of this host, in any spelling: 0 does, too."""
    if host in ("", "*"):
        return True
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return False  # listening reports the error
    return any(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_unspecified for *_, address in found)
