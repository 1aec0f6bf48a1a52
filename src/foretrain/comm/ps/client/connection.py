"""Connection of a worker to one shard of the parameter server.

It is made anew when it breaks, but messages in flight are lost with it, and so is the session. The owner learns from
`Connection.sessions` that a new one has begun, and resends the requests that have no answer.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Sequence
from hmac import compare_digest
from typing import Final

from foretrain.comm.coordinator.handshake import PROOF_SIZE, nonce
from foretrain.comm.ps.client.inflight import InFlight
from foretrain.comm.ps.frames import ASIDE, BESIDE, BUSY, FAILURES, HANDSHAKE_LIMIT, FrameKind, Handshake, Header
from foretrain.comm.ps.placement import LIMIT
from foretrain.comm.ps.wire import Arrival, Payload, Progress, Watched, Why, Wire
from foretrain.errors import ForetrainError, PeerLost

logger = logging.getLogger("foretrain.comm.ps")

_ANSWER_TIMEOUT: Final = 5.0
"""Seconds that a server has to take connections, and to answer in a handshake, before another attempt."""
_LOOKUP_WAIT: Final = 0.1
"""Seconds that a look-up of a host's name is waited for at a time."""
_UNRESOLVED, _UNREACHED, _UNANSWERED = (
    "its host's name has no address: is it right, and does name resolution work?",
    "was it started, and is it there?",
    "it accepts connections and says nothing: is it a server of foretrain, and does it run?",
)
"""Reasons why no connection stands yet, by how far the latest attempt came."""
_RETRY_INTERVAL: Final = 0.1
"""Seconds between two handshakes with a server that serves another job."""
_REDIAL_INTERVALS: Final = (0.05, 1.0)
"""Least and most seconds before a connection is made anew."""
_HEARTBEAT_INTERVAL: Final = 1.0
"""Seconds."""


def client_wire() -> Wire:
    """Return a wire for connections to servers."""
    return Wire(LIMIT, HANDSHAKE_LIMIT)


class _Lookup:
    """Look-up of a host's address on a thread of its own, as the system's resolver has no deadline.

    Attributes:
        done: set once there is an answer.
        address: the host's first address, in digits, and the port; None where the host is not known.
    """

    def __init__(self, host: str, port: int) -> None:
        self.done = threading.Event()
        self.address: tuple[str, int] | None = None
        self._look(host, port, socket.AI_NUMERICHOST)
        if self.address is None:
            self.done.clear()
            threading.Thread(target=self._look, args=(host, port), name="foretrain-lookup", daemon=True).start()
            self.done.wait(_LOOKUP_WAIT)

    def _look(self, host: str, port: int, flags: int = 0) -> None:
        with contextlib.suppress(OSError, UnicodeError):  # the latter of a name that cannot be one
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
            self.address = str(found[0][4][0]), port
        self.done.set()


class Connection:
    """Pair of connections to one shard: the second is for messages in `ASIDE`. Not thread-safe.

    Args:
        wire: carries it; its owner polls.
        address: host and port of the shard.
        secret: the job's.
        job: its name.
        rank: this worker's.
        shard: the server's number.

    Attributes:
        sessions: number of sessions so far.
        missing: what the latest attempt to connect has not got, as a question to the user.
        busy: the server's reason to refuse this worker for now; None where it does not.
        heard: time of the last message that was read, s of the monotonic clock.
    """

    def __init__(self, wire: Wire, address: tuple[str, int], secret: bytes, job: str, rank: int, shard: int) -> None:
        self.address, self.shard = address, shard
        self._wire, self._secret, self._job, self._rank = wire, secret, job.encode(), rank
        self.busy: str | None = None
        self.missing = _UNRESOLVED
        self._lookup: _Lookup | None = None
        """Search for the server's address, before connections to it are begun."""
        self._enters = True
        """True while handshakes may begin."""
        self._numbers: list[int | None] = [None, None]
        """The two connections, by the wire's numbers."""
        self._opened: set[int] = set()
        self._arrived: list[Arrival] = []
        self._retry_at = self._deadline = math.inf
        """Times of the next attempt to connect, and until which the present one must get on."""
        self._pause = _REDIAL_INTERVALS[0]
        self._pending: tuple[bool, Handshake] | None = None
        """Handshake under way, and whether it is the second connection's."""
        self._first: Handshake | None = None
        """Handshake of the first connection, once the server has proved its identity."""
        self._established = self.closed = False
        self.sessions = 0
        self.heard = time.monotonic()
        self._dial()

    @property
    def established(self) -> bool:
        """Return whether both ends have proved their identities."""
        return self._established

    @property
    def due(self) -> float:
        """Return the time from which on `read` acts though nothing has arrived, s of the monotonic clock."""
        if self.closed:
            return math.inf
        if self._lookup is not None:
            return time.monotonic() + _LOOKUP_WAIT
        return min(self._retry_at, self._deadline)

    def hold(self) -> None:
        """Postpone the handshake until `enter` is called."""
        self._enters = False

    def enter(self) -> None:
        """Begin the handshake if it has not begun."""
        if not self._enters:
            self._enters = True
            self._greet_if_open()

    def wait(self, seconds: float) -> None:
        """Poll the wire, for at most ``seconds``."""
        self._wire.poll(seconds)

    def read(self) -> list[tuple[Header, memoryview]]:
        """Return the messages that have arrived when the wire was polled, without the handshake's.

        Raises:
            PeerLost: the peer is not the job's server.
        """
        arrived = self._arrived[:]
        self._arrived.clear()
        beside = self._numbers[1]
        found: list[tuple[Header, memoryview]] = []
        # First the second connection's, as a FAIL would be lost with the session that ends after it.
        for arrival in sorted(arrived, key=lambda each: each.connection != beside) if len(arrived) > 1 else arrived:
            if arrival.header is not None and self._established and arrival.connection in self._numbers:
                found.append((arrival.header, arrival.payload))
            elif arrival.connection in self._numbers:
                before = self.sessions
                self._change(arrival)
                if self.sessions > before:
                    # The owner repeats its requests in the new session; only a FAIL must not be lost.
                    found = [each for each in found if each[0].kind is FrameKind.FAIL]
        if found:
            self.heard = time.monotonic()
        self._watch()
        return found

    def take_answers(self, flights: InFlight, epoch: int) -> None:
        """Let the wire take this session's acknowledgements of `push` in the declaration ``epoch``, and its sums."""
        first, second = self._numbers
        if first is not None and second is not None:
            self._wire.take_answers((first, second), flights.native, self.shard, self._rank, epoch)

    def push(self, step: int, flag: int, spans: bytes) -> bool:
        """Push what of ``spans`` is on this shard, see `foretrain.comm.ps.wire.Wire.push`; return whether it could."""
        number = self._numbers[0]
        return self._established and number is not None and self._wire.push(number, step, flag, spans)

    def take_back(self, header: Header, payload: memoryview) -> bool:
        """Let the wire take a message that `read` has returned; return False if it cannot."""
        return self._numbers[0] is not None and self._wire.take_back(self._numbers[0], header, payload)

    def last_heard(self) -> float:
        """Return the time of the shard's last message, s of the monotonic clock."""
        return self.heard if self._numbers[0] is None else max(self.heard, self._wire.heard(self._numbers[0]))

    def send(self, header: Header, payload: Payload = b"") -> bool:
        """Send a message, whose payload must not change until it is answered; return False without a session."""
        number = self._numbers[header.kind in ASIDE]
        return self._established and number is not None and self._wire.send(number, header, payload, self._rank)

    def close(self) -> None:
        """Close both connections when what was sent has left; the wire's owner polls until then."""
        self.closed = True
        self._hang_up(orderly=True)

    @property
    def _where(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"

    def _dial(self) -> None:
        self._retry_at = math.inf
        self.missing = _UNRESOLVED
        self._lookup = _Lookup(*self.address)
        self._connect_if_found()

    def _connect_if_found(self) -> None:
        """Begin to connect once the server's address is found."""
        if self._lookup is None or not self._lookup.done.is_set() or self.closed:
            return
        address, self._lookup = self._lookup.address, None
        if address is not None:
            self.missing = _UNREACHED
            self._deadline = time.monotonic() + _ANSWER_TIMEOUT
            for lane in range(2):
                self._numbers[lane] = self._wire.connect(*address, self._arrived.append)
        if None in self._numbers:
            self._redial()

    def _hang_up(self, *, orderly: bool = False) -> None:
        for number in self._numbers:
            self._wire.end(number, orderly=orderly)
        self._numbers = [None, None]
        self._opened.clear()
        self._established, self._pending, self._first = False, None, None
        self._deadline = math.inf

    def _redial(self) -> None:
        self._hang_up()
        self._retry_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _REDIAL_INTERVALS[1])

    def _watch(self) -> None:
        now = time.monotonic()
        if self._lookup is not None:
            self._connect_if_found()
        elif now > self._retry_at and not self.closed:
            self._dial()
        elif now > self._deadline:
            # It is being started, stopped, overloaded, or out of reach: the owner decides how long to wait.
            self._redial()

    def _change(self, arrival: Arrival) -> None:
        """Handle an event of a handshake, or the end of a connection."""
        if arrival.closed is not None:
            if arrival.closed == Why.NO_MESSAGE and not self._established:
                why = "is no server of foretrain, or of another version: is the address right?"
                raise PeerLost(f"server {self.shard} at {self._where} {why}")
            if arrival.closed == Why.FORGED:
                raise PeerLost(f"server {self.shard} at {self._where} sent a message with a wrong tag")
            self._redial()
        elif arrival.header is None:
            self._opened.add(arrival.connection)
            if len(self._opened) == 2:
                self.missing, self._deadline = _UNANSWERED, math.inf
                self._greet_if_open()
        elif arrival.header.kind is FrameKind.FAIL and self._first is not None:
            raise failure(arrival.header, arrival.payload)
        else:
            self._shake_hands(arrival.header, bytes(arrival.payload))

    def _greet_if_open(self) -> None:
        if self._enters and len(self._opened) == 2 and self._pending is None:
            self._greet(beside=False)

    def _greet(self, *, beside: bool) -> None:
        self._pending = beside, Handshake(self._rank, self.shard, nonce())
        self._deadline = time.monotonic() + _ANSWER_TIMEOUT
        self._say(FrameKind.HELLO, self._pending[1].worker, BESIDE if beside else 0)

    def _say(self, kind: FrameKind, payload: bytes, flag: int = 0) -> None:
        assert self._pending is not None
        number = self._numbers[self._pending[0]]
        assert number is not None
        self._wire.send(number, Header(kind, flag, size=len(payload)), payload, self._rank)

    def _shake_hands(self, header: Header, payload: bytes) -> None:
        if self._pending is None:
            return
        beside, known = self._pending
        if header.kind is FrameKind.STRANGER:
            why = "has another secret: start servers and workers with the same FORETRAIN_SECRET"
            raise PeerLost(f"server {self.shard} at {self._where} {why}")
        if header.kind is FrameKind.CHALLENGE and not known.server and len(payload) == len(known.worker):
            known = known._replace(server=payload)
            self._pending = beside, known
            what = self._first.nonces if beside and self._first is not None else self._job
            self._say(FrameKind.PROOF, known.proof(self._secret, "worker beside" if beside else "worker", what) + what)
        elif header.kind is FrameKind.REFUSED and known.server:
            shown, why = payload[:PROOF_SIZE], payload[PROOF_SIZE:]
            if not compare_digest(shown, known.proof(self._secret, "refusal", bytes((header.flag,)) + why)):
                raise PeerLost(f"server {self.shard} does not know the job's secret")
            self._refused(header.flag, why.decode(errors="replace"))
        elif header.kind is FrameKind.WELCOME and known.server:
            if not compare_digest(payload, known.proof(self._secret, "server")):
                raise PeerLost(f"server {self.shard} does not know the job's secret")
            self._welcomed(beside, known)

    def _welcomed(self, beside: bool, known: Handshake) -> None:
        keys, number = known.keys(self._secret), self._numbers[beside]
        assert number is not None
        self._wire.keys(number, keys.worker, keys.server)
        if not beside:
            self._first = known
            self._greet(beside=True)
            return
        self._established, self._pending, self.busy = True, None, None
        self._deadline, self._pause = math.inf, _REDIAL_INTERVALS[0]
        self.sessions += 1
        self.heard = time.monotonic()

    def _refused(self, flag: int, why: str) -> None:
        text = f"{why} (at {self._where})"
        if flag != BUSY:
            raise FAILURES[flag if flag < len(FAILURES) else 0](text)
        if self.busy is None:
            logger.warning("%s: worker %d waits for that", text, self._rank)
        self._hang_up()
        self.busy, self._retry_at = text, time.monotonic() + _RETRY_INTERVAL


class Links:
    """Connections to every shard of a job.

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
        self._wire = client_wire()
        self._heartbeat_sent = time.monotonic()
        self.returns = False
        self.connections = [
            Connection(self._wire, address, secret, job, rank, shard) for shard, address in enumerate(addresses)
        ]
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
                # The others wait for their turn after it.
                first = f"{missing[0].shard} at {missing[0].address[0]}:{missing[0].address[1]}"
                raise PeerLost(f"no answer from server {first} after {timeout:g} s: {missing[0].missing}")
            missing[0].enter()
            self.poll(0.01)
            for connection in self.connections:
                for header, payload in connection.read():
                    if header.kind is FrameKind.FAIL:
                        raise failure(header, payload)
            self.live()

    def watch(self, watched: Watched) -> None:
        """Let ``watched`` end the wait in `poll`."""
        self._wire.watch(watched)

    def poll(self, seconds: float) -> None:
        """Send, and wait for something to read or a connection that is due, for at most ``seconds``."""
        due = min(connection.due for connection in self.connections) - time.monotonic()
        self._wire.poll(max(0.0, min(seconds, due)))

    def progress(self) -> list[Progress]:
        """Return what answers that the wire has taken have brought about since the last call."""
        return self._wire.progress()

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
                connection.close()
        self._wire.close(linger)


def failure(header: Header, payload: memoryview) -> ForetrainError:
    """Return the error in a FAIL message."""
    return FAILURES[min(header.flag, len(FAILURES) - 1)](bytes(payload).decode(errors="replace"))
