"""Connection of a worker to one shard of the parameter server.

ZeroMQ reconnects by itself, but messages in flight are lost with a broken connection, and so is the session. The owner
learns from `Connection.sessions` that a new one has begun, and resends the requests that have no answer.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from hmac import compare_digest
from typing import Any, Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from foretrain.comm.coordinator.handshake import PROOF_SIZE, nonce
from foretrain.comm.ps.frames import ASIDE, BUSY, FAILURES, UNTAGGED, FrameKind, Header, Malformed, unpack
from foretrain.comm.ps.placement import LIMIT
from foretrain.comm.ps.session import AuthenticatedSession, Rejected, ZeroCopy, session_proof, set_password, untagged
from foretrain.errors import ForetrainError, PeerLost

logger = logging.getLogger("foretrain.comm.ps")

_ANSWER_TIMEOUT: Final = 5.0
"""Seconds that a server has to answer in a handshake."""
_RETRY_INTERVAL: Final = 0.1
"""Seconds between two handshakes with a server that serves another job."""
_HEARTBEAT_INTERVAL: Final = 1.0
"""Seconds."""
_REFUSED: Final = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
"""Events after which ZeroMQ does not reconnect."""
_MONITORED: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _REFUSED
"""Events after which the peer is connected or disconnected."""
_ANSWER_SIZE: Final = 4096
"""Most bytes that are read of an answer in a handshake."""


class _Lane:
    """Socket of a connection, with its monitor.

    Attributes:
        up: whether the peer is connected.
        shut: reason why it will never connect; None where it may.
    """

    def __init__(self, context: zmq.Context[Any], address: tuple[str, int], secret: bytes) -> None:
        self.up = False
        self.shut: str | None = None
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.IMMEDIATE, 1),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.MAXMSGSIZE, LIMIT),
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 1000),
        ):
            self.socket.setsockopt(option, value)
        set_password(self.socket, secret)
        self.monitor = self.socket.get_monitor_socket(_MONITORED)
        self.socket.connect(f"tcp://{address[0]}:{address[1]}")

    def changed(self) -> bool:
        """Return whether the peer has connected or disconnected since the last call."""
        found = False
        while self.monitor.poll(0):
            event = parse_monitor_message(self.monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.shut = "has another secret: start servers and workers with the same FORETRAIN_SECRET"
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self.shut = "is no server of foretrain, or of another version: is the address right?"
            self.up, found = event == zmq.EVENT_HANDSHAKE_SUCCEEDED, True
        return found

    def read(self) -> list[zmq.Frame] | None:
        """Return the frames of a message; None if there is none."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None

    def send(self, frames: list[Any]) -> bool:
        """Send ``frames``; return whether a peer was connected."""
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def close(self, linger: float) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(int(linger * 1e3))


class Connection:
    """Pair of connections to one shard: the second is for messages in `ASIDE`. Not thread-safe.

    Args:
        context: of ZeroMQ.
        address: host and port of the shard.
        secret: the job's.
        job: its name.
        rank: this worker's.
        shard: the server's number.

    Attributes:
        sessions: number of sessions so far.
        busy: the server's reason to refuse this worker for now; None where it does not.
        heard: time of the shard's last message, s of the monotonic clock.
    """

    def __init__(
        self, context: zmq.Context[Any], address: tuple[str, int], secret: bytes, job: str, rank: int, shard: int
    ) -> None:
        self.address, self.shard = address, shard
        self._secret, self._job, self._rank = secret, job.encode(), rank
        self.busy: str | None = None
        self._retry_at = math.inf
        """Time of the next handshake with a busy server."""
        self._enters = True
        """Whether handshakes may begin."""
        self._session: AuthenticatedSession | None = None
        self._beside: AuthenticatedSession | None = None
        """Session of the second connection."""
        self._pending: tuple[bytes, bytes, float] | None = None
        """This worker's nonce, the server's once it is known, and the deadline of its answer."""
        self.sessions = 0
        self.heard = time.monotonic()
        self._main, self._aside = (_Lane(context, address, secret) for _ in range(2))

    @property
    def established(self) -> bool:
        """Return whether both ends have proved their identities."""
        return self._session is not None

    @property
    def closed(self) -> bool:
        """Return whether `close` was called."""
        return bool(self._main.socket.closed)

    @property
    def sockets(self) -> tuple[zmq.Socket[Any], ...]:
        """Return the sockets to poll; call `read` when any of them is readable."""
        return tuple(socket for lane in (self._main, self._aside) for socket in (lane.socket, lane.monitor))

    def hold(self) -> None:
        """Postpone the handshake until `enter` is called."""
        self._enters = False

    def enter(self) -> None:
        """Begin the handshake if it has not begun."""
        if not self._enters:
            self._enters = True
            if self._main.up and self._aside.up:
                self._say_hello()

    def wait(self, seconds: float) -> None:
        """Wait until there is a message to read, at most ``seconds``."""
        zmq.select(list(self.sockets), [], [], seconds)

    def read(self) -> list[tuple[Header, memoryview]]:
        """Return the messages that have arrived, without the handshake's.

        Raises:
            PeerLost: the peer is not the job's server.
        """
        self._watch()
        found: list[tuple[Header, memoryview]] = []
        # First, as a FAIL would be lost with the session that ends after it.
        while (frames := self._aside.read()) is not None:
            if (message := self._hear_aside(frames)) is not None:
                found.append(message)
        while (frames := self._main.read()) is not None:
            before = self.sessions
            message = self._hear(frames)
            if message is not None:
                found.append(message)
            elif self.sessions > before:
                # The owner repeats its requests in the new session; only a FAIL must not be lost.
                found = [each for each in found if each[0].kind is FrameKind.FAIL]
        if found:
            self.heard = time.monotonic()
        return found

    def send(self, header: Header, payload: bytes | memoryview = b"") -> bool:
        """Send a message, whose payload must not change until it is answered; return False without a session."""
        aside = header.kind in ASIDE
        session = self._beside if aside else self._session
        if session is None:
            return False
        first = session.seal(header, payload)
        return (self._aside if aside else self._main).send([first, payload] if len(payload) else [first])

    def close(self, linger: float = 0.0) -> None:
        """Close the sockets; sent messages have ``linger`` seconds to leave."""
        for lane in (self._main, self._aside):
            lane.close(linger)

    def _watch(self) -> None:
        if self._main.changed() | self._aside.changed():
            self._forget()
            self.busy = None
            if self._main.up and self._aside.up:
                self._say_hello()
        if time.monotonic() > self._retry_at:
            self._say_hello()
        if why := self._main.shut or self._aside.shut:
            raise PeerLost(f"server {self.shard} at {self._where} {why}")
        if self._pending is not None and time.monotonic() > self._pending[2]:
            if self.sessions or self.busy is not None:
                # It was the job's server, or may become it: the owner decides how long to wait.
                self._say_hello()
                return
            why = f"does not answer worker {self._rank} within {_ANSWER_TIMEOUT:g} s: is it overloaded?"
            raise PeerLost(f"server {self.shard} at {self._where} {why}")

    @property
    def _where(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"

    def _forget(self) -> None:
        self._session = self._beside = self._pending = None
        self._retry_at = math.inf

    def _say_hello(self) -> None:
        self._forget()
        if not self._enters:
            return
        ours = nonce()
        self._pending = (ours, b"", time.monotonic() + _ANSWER_TIMEOUT)
        self._main.send(untagged(FrameKind.HELLO, self._rank, ours))

    def _hear(self, frames: list[zmq.Frame]) -> tuple[Header, memoryview] | None:
        """Return a message of the session; None for one of the handshake or of an earlier session."""
        header, tag, payload = self._parsed(frames)
        if header.kind in UNTAGGED:
            self._shake_hands(header, bytes(payload[:_ANSWER_SIZE]))
            return None
        if self._session is None:
            return None
        try:
            self._session.open(header, tag, payload)
        except Rejected as error:
            raise PeerLost(f"server {self.shard}: {error}") from None
        return header, payload

    def _hear_aside(self, frames: list[zmq.Frame]) -> tuple[Header, memoryview] | None:
        """Return a message of the second session; one of an earlier session may arrive when the next has begun."""
        header, tag, payload = self._parsed(frames)
        if header.kind is FrameKind.STRANGER:
            self._shake_hands(header, b"")
            return None
        if self._beside is None:
            return None
        try:
            self._beside.open(header, tag, payload)
        except Rejected as error:
            if error.reason == "gap":
                self._say_hello()
            return None
        return header, payload

    def _parsed(self, frames: list[zmq.Frame]) -> tuple[Header, bytes, memoryview]:
        if not 1 <= len(frames) <= 2:
            raise PeerLost(f"server {self.shard} sent a message of {len(frames)} frames")
        try:
            header, tag = unpack(frames[0].bytes)
        except Malformed as error:
            raise PeerLost(f"server {self.shard} sent what does not read: {error}") from None
        return header, tag, frames[1].buffer if len(frames) > 1 else memoryview(b"")

    def _shake_hands(self, header: Header, payload: bytes) -> None:
        kind = header.kind
        if kind is FrameKind.STRANGER:
            if self._pending is None:
                self._say_hello()
            return
        if self._pending is None:
            return
        ours, theirs, until = self._pending
        if kind is FrameKind.CHALLENGE and not theirs:
            self._pending = (ours, payload, until)
            answer = session_proof(self._secret, "worker", self._rank, self.shard, ours, payload, self._job)
            self._main.send(untagged(FrameKind.PROOF, self._rank, answer + self._job))
        elif kind is FrameKind.REFUSED and theirs:
            shown, why = payload[:PROOF_SIZE], payload[PROOF_SIZE:]
            expected = session_proof(
                self._secret, "refusal", self._rank, self.shard, ours, theirs, bytes((header.flag,)) + why
            )
            if not compare_digest(shown, expected):
                raise PeerLost(f"server {self.shard} does not know the job's secret")
            self._refused(header.flag, why.decode(errors="replace"))
        elif kind is FrameKind.WELCOME and theirs:
            if not compare_digest(payload, session_proof(self._secret, "server", self._rank, self.shard, ours, theirs)):
                raise PeerLost(f"server {self.shard} does not know the job's secret")
            self._session, self._beside = (
                AuthenticatedSession(self._secret, self._rank, self.shard, ours, theirs, serves=False, aside=aside)
                for aside in (False, True)
            )
            self._pending = self.busy = None
            self.sessions += 1
            self.heard = time.monotonic()
            # By this message the server learns which connection is the second.
            self.send(Header(FrameKind.ALIVE))

    def _refused(self, flag: int, why: str) -> None:
        text = f"{why} (at {self._where})"
        if flag != BUSY:
            raise FAILURES[flag if flag < len(FAILURES) else 0](text)
        if self.busy is None:
            logger.warning("%s: worker %d waits for that", text, self._rank)
        self._forget()
        self.busy, self._retry_at = text, time.monotonic() + _RETRY_INTERVAL


class Links:
    """Connections to every shard of a job, and the ZeroMQ thread behind them.

    Args:
        addresses: host and port of each shard, by number.
        secret: the job's.
        job: a name that no other has, the same on all workers.
        rank: this worker's.

    Attributes:
        connections: by shard.
        returns: whether this worker comes back after its BYE, with other connections.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]], secret: bytes, job: str, rank: int) -> None:
        self._context, self._zero_copy = zmq.Context(), ZeroCopy()
        self._heartbeat_sent = time.monotonic()
        self.returns = False
        self.connections: list[Connection] = []
        try:
            for shard, address in enumerate(addresses):
                self.connections.append(Connection(self._context, address, secret, job, rank, shard))
        except BaseException:
            self._context.destroy(linger=0)
            self._zero_copy.close()
            raise
        # One handshake after the other: two waiting jobs must not get one server each.
        for connection in self.connections[1:]:
            connection.hold()

    def establish(self, timeout: float) -> None:
        """Wait until every shard has admitted this worker.

        Raises:
            PeerLost: one has not, ``timeout`` seconds later, or has another secret.
            Disagreement: one was started for fewer workers.
        """
        deadline = time.monotonic() + timeout
        while missing := [connection for connection in self.connections if not connection.established]:
            if time.monotonic() > deadline:
                if busy := [each.busy for each in missing if each.busy is not None]:
                    raise PeerLost(f"{busy[0]}; after {timeout:g} s: end that, or start servers for this one")
                shown = ", ".join(f"{each.shard} at {each.address[0]}:{each.address[1]}" for each in missing)
                raise PeerLost(f"no answer from server {shown} after {timeout:g} s: was it started, and is it there?")
            missing[0].enter()
            missing[0].wait(0.01)
            for connection in self.connections:
                for header, payload in connection.read():
                    if header.kind is FrameKind.FAIL:
                        raise failure(header, payload)
            self.live()

    def live(self) -> None:
        """Send heartbeats to the servers. Call often while this worker waits for others."""
        now = time.monotonic()
        if now - self._heartbeat_sent > _HEARTBEAT_INTERVAL:
            self._heartbeat_sent = now
            for connection in self.connections:
                connection.send(Header(FrameKind.ALIVE))

    def close(self, linger: float = 0.0) -> None:
        """Close all connections; sent messages have ``linger`` seconds to leave. Idempotent."""
        for connection in self.connections:
            if not connection.closed:
                connection.close(linger)
        self._context.term()
        self._zero_copy.close()


def failure(header: Header, payload: memoryview) -> ForetrainError:
    """Return the error in a FAIL message."""
    return FAILURES[min(header.flag, len(FAILURES) - 1)](bytes(payload).decode(errors="replace"))
