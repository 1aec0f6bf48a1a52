"""Handshake of links between ranks: both ends prove that they know the job's secret.

One rank opens a `Listener`, the others `connect` to it, and both ends then hold a `Link`. Neither end trusts the other
before it has answered a fresh challenge:

    listener → rank   magic, 32-byte nonce S
    rank → listener   rank, 32-byte nonce C, HMAC-SHA256(secret, "rank" ‖ rank ‖ C ‖ S)
    listener → rank   HMAC-SHA256(secret, "listener" ‖ rank ‖ C ‖ S)

The listener proves itself last, to a rank it has accepted, so its proof is also the acceptance and an unauthenticated
peer never gets a MAC of its choosing. Replay fails on the nonces, reflection on the role. Later messages are neither
encrypted nor authenticated: the handshake does not protect against changed packets on the job's own network.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from foretrain.comm.coordinator.addresses import resolved
from foretrain.comm.coordinator.link import SEND_TIMEOUT, Link, LinkError
from foretrain.errors import ConfigError

logger = logging.getLogger("foretrain.link")

HANDSHAKE_TIMEOUT = 5.0
"""Seconds that a handshake may take."""
PENDING_LIMIT = 64
"""Handshakes at once; more connections wait in the kernel's queue."""
NONCE_SIZE = 32
PROOF_SIZE = 32
SECRET = "FORETRAIN_SECRET"
"""Environment variable with a job's secret, in hexadecimal digits."""
SECRET_SIZE = 32
"""Least bytes of the job's secret."""

_MAY_COME = {errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN}
"""Why a host cannot be reached that may be a moment later."""
_MAGIC = b"ftlink1\n"
_CHALLENGE_SIZE = len(_MAGIC) + NONCE_SIZE
_ANSWER = struct.Struct(f"<I{NONCE_SIZE}s{PROOF_SIZE}s")
_RANK_ROLE = "foretrain link 1: rank"
_LISTENER_ROLE = "foretrain link 1: listener"


def nonce() -> bytes:
    """Return `NONCE_SIZE` random bytes."""
    return secrets.token_bytes(NONCE_SIZE)


def proof(secret: bytes, label: str, *fields: bytes) -> bytes:
    """Return the HMAC-SHA256 over ``label``, which names the role, and ``fields``.

    All fields but the last have a fixed size, and labels have no NUL, so that no two inputs join to the same bytes.
    """
    return hmac.digest(secret, label.encode() + b"\0" + b"".join(fields), "sha256")


@dataclass(slots=True)
class _PendingPeer:
    """Connection whose peer has not yet proved its identity."""

    socket: socket.socket
    address: tuple[str, int]
    deadline: float
    nonce: bytes
    received: bytearray = field(default_factory=bytearray)


class Listener:
    """Listening end: binds to one address and accepts each expected rank once. Not thread-safe.

    Attributes:
        refused: number of refused connections; each is logged to ``foretrain.link`` with its address and the reason.
    """

    def __init__(
        self, host: str, secret: bytes, *, port: int = 0, expected: Iterable[int], send_timeout: float = SEND_TIMEOUT
    ) -> None:
        """Bind and listen; ``port`` 0 takes a free one, see `address`.

        Raises:
            ConfigError: the secret is short, or the address is none of this host's, not a single one, or taken.
        """
        _check_secret(secret)
        if host in ("", "0.0.0.0", "::"):
            raise ConfigError("host", host, "means every address of this host", "name one, see local_address")
        self.refused = 0
        self._secret = secret
        self._send_timeout = send_timeout
        self._expected = frozenset(expected)
        self._links: dict[int, Link] = {}
        self._handed: set[int] = set()
        self._pending: dict[int, _PendingPeer] = {}
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(max(128, 2 * len(self._expected)))
            self._socket.setblocking(False)
            self._selector = selectors.DefaultSelector()
        except OSError as error:
            self._socket.close()
            what, remedy = f"cannot be listened on ({error})", "name an address of this host"
            raise ConfigError("host", f"{host}:{port}", what, remedy) from None
        self._listening = False
        self._listen()

    @property
    def address(self) -> tuple[str, int]:
        """Return (host, port) to `connect` to."""
        return self._socket.getsockname()[:2]

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def accept(self, timeout: float) -> dict[int, Link]:
        """Accept ranks until every expected one is linked or ``timeout`` seconds have passed.

        A further call continues pending handshakes.

        Returns:
            The links of all ranks accepted so far, by rank. The caller owns them; they outlive the listener.

        Raises:
            LinkError: this process can have no more connections.
        """
        deadline = time.monotonic() + timeout
        while len(self._links) < len(self._expected):
            now = time.monotonic()
            until = min([deadline, *(candidate.deadline for candidate in self._pending.values())])
            for key, _ in self._selector.select(max(0.0, until - now)):
                if key.data is None:
                    self._greet()
                else:
                    self._hear(key.data)
            self._refuse_late()
            if time.monotonic() >= deadline:
                break
        self._handed.update(self._links)
        return dict(self._links)

    def close(self) -> None:
        """Stop listening and refuse pending connections. Idempotent. Links that `accept` returned stay open."""
        for candidate in list(self._pending.values()):
            self._refuse(candidate, "the listener closed before it had said who it is")
        for rank in self._links.keys() - self._handed:
            self._links[rank].close()
        self._selector.close()
        self._socket.close()

    def _listen(self) -> None:
        """Select on the listening socket while the number of handshakes is below its limit."""
        room = len(self._pending) < PENDING_LIMIT
        if room and not self._listening:
            self._selector.register(self._socket, selectors.EVENT_READ)
        elif not room and self._listening:
            self._selector.unregister(self._socket)
        self._listening = room

    def _greet(self) -> None:
        try:
            accepted, address = self._socket.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                raise LinkError(f"cannot accept a rank: {error.strerror}; raise the limit (ulimit -n)") from None
            return  # the connection was gone before it was taken
        candidate = _PendingPeer(accepted, address[:2], time.monotonic() + HANDSHAKE_TIMEOUT, nonce())
        self._pending[accepted.fileno()] = candidate
        accepted.setblocking(False)
        self._selector.register(accepted, selectors.EVENT_READ, candidate)
        self._listen()
        self._say(candidate, _MAGIC + candidate.nonce)

    def _hear(self, candidate: _PendingPeer) -> None:
        try:
            # Never more than the answer: what follows it belongs to the link.
            heard = candidate.socket.recv(_ANSWER.size - len(candidate.received))
        except BlockingIOError:
            return None
        except OSError as error:
            return self._refuse(candidate, error.strerror or str(error))
        if not heard:
            return self._refuse(candidate, "it hung up before it had said who it is")
        candidate.received += heard
        if len(candidate.received) == _ANSWER.size:
            self._judge(candidate)
        return None

    def _judge(self, candidate: _PendingPeer) -> None:
        rank, theirs, given = _ANSWER.unpack(candidate.received)
        if not hmac.compare_digest(given, _link_proof(self._secret, _RANK_ROLE, rank, theirs, candidate.nonce)):
            self._refuse(candidate, "it does not know the job's secret")
        elif rank not in self._expected:
            self._refuse(candidate, f"rank {rank} is not expected")
        elif rank in self._links:
            self._refuse(candidate, f"rank {rank} is here already")
        elif self._say(candidate, _link_proof(self._secret, _LISTENER_ROLE, rank, theirs, candidate.nonce)):
            self._forget(candidate)
            self._links[rank] = Link(candidate.socket, rank, self._send_timeout)

    def _say(self, candidate: _PendingPeer, data: bytes) -> bool:
        """Send a few bytes, which an empty socket buffer always takes; refuse a peer that has disconnected."""
        try:
            if candidate.socket.send(data) == len(data):
                return True
            reason = "it takes no answer"
        except OSError as error:
            reason = error.strerror or str(error)
        self._refuse(candidate, reason)
        return False

    def _refuse_late(self) -> None:
        now = time.monotonic()
        for candidate in [candidate for candidate in self._pending.values() if candidate.deadline <= now]:
            self._refuse(candidate, f"it did not say who it is within {HANDSHAKE_TIMEOUT:g} s")

    def _refuse(self, candidate: _PendingPeer, reason: str) -> None:
        self.refused += 1
        logger.warning("refused a connection from %s:%d: %s", *candidate.address, reason)
        self._forget(candidate)
        candidate.socket.close()

    def _forget(self, candidate: _PendingPeer) -> None:
        del self._pending[candidate.socket.fileno()]
        self._selector.unregister(candidate.socket)
        self._listen()


def connect(
    address: tuple[str, int],
    secret: bytes,
    rank: int,
    timeout: float,
    *,
    peer: int = 0,
    send_timeout: float = SEND_TIMEOUT,
) -> Link:
    """Link this ``rank`` to the `Listener` at ``address``; retry until one listens there.

    Args:
        address: host and port, as `Listener.address` gives them.
        secret: the job's, at least `SECRET_SIZE` bytes.
        rank: of this process.
        timeout: seconds until the link must be made.
        peer: the listener's rank, which is not part of the handshake.
        send_timeout: of the link, see `Link.send`.

    Raises:
        LinkError: no process listened, or it is no listener of this job, or it refused this rank.
        ConfigError: the secret is short or the rank is none.
    """
    _check_secret(secret)
    if not 0 <= rank < 1 << 32:
        raise ConfigError("rank", rank, "is not a rank", "write a whole number from 0")
    deadline = time.monotonic() + timeout
    where = f"{address[0]}:{address[1]}"
    try:
        connected = _dial(address, deadline)
    except OSError as error:
        remedy = "is the listening rank running, and can this host reach it?"
        raise LinkError(
            f"rank {rank} cannot connect to {where}: {error} (waited {timeout:g} s); {remedy}", peer
        ) from None
    try:
        _introduce(connected, secret, rank, deadline)
        return Link(connected, peer, send_timeout)
    except (OSError, EOFError) as error:
        connected.close()
        raise LinkError(f"rank {rank} is not linked to {where}: {error}", peer) from None
    except BaseException:
        connected.close()
        raise


def _dial(address: tuple[str, int], deadline: float) -> socket.socket:
    pause = 0.01
    while True:
        family, place = resolved(*address)
        dialled = socket.socket(family, socket.SOCK_STREAM)
        try:
            dialled.settimeout(max(1e-3, deadline - time.monotonic()))
            dialled.connect(place)
            # The kernel may choose the very port that is dialled as the local one: TCP then connects the socket to
            # itself, and no process listens there.
            if dialled.getsockname() != dialled.getpeername():
                return dialled
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        except BaseException as error:
            dialled.close()
            # A host that has just been started may not listen yet, or not have its network yet.
            comes = isinstance(error, OSError) and error.errno in _MAY_COME
            if not comes or time.monotonic() + pause >= deadline:
                raise
        time.sleep(pause)
        pause = min(0.25, 1.5 * pause)


def _introduce(connected: socket.socket, secret: bytes, rank: int, deadline: float) -> None:
    """Run the connecting side of the handshake; EOFError and OSError carry a text for people."""
    challenge = _read_exactly(connected, _CHALLENGE_SIZE, deadline, "it hung up without a word; is it a listener?")
    magic, theirs = challenge[: len(_MAGIC)], challenge[len(_MAGIC) :]
    if magic != _MAGIC:
        raise EOFError("what answers there is no foretrain listener; is the address right?")
    ours = nonce()
    connected.sendall(_ANSWER.pack(rank, ours, _link_proof(secret, _RANK_ROLE, rank, ours, theirs)))
    refusal = (
        "it refused us: it has another secret, does not expect this rank, or has linked it already; its log says which"
    )
    answer = _read_exactly(connected, PROOF_SIZE, deadline, refusal)
    if not hmac.compare_digest(answer, _link_proof(secret, _LISTENER_ROLE, rank, ours, theirs)):
        raise EOFError("what answers there does not know the job's secret; is the address right?")


def _read_exactly(connected: socket.socket, size: int, deadline: float, ended: str) -> bytes:
    data = b""
    while len(data) < size:
        connected.settimeout(max(1e-3, deadline - time.monotonic()))
        try:
            part = connected.recv(size - len(data))
        except ConnectionResetError:
            part = b""
        except TimeoutError:
            raise EOFError("it did not answer in time; is it a foretrain listener, and is its rank waiting?") from None
        if not part:
            raise EOFError(ended)
        data += part
        if len(data) < size and time.monotonic() >= deadline:
            raise EOFError("it did not answer in time")
    return data


def _link_proof(secret: bytes, role: str, rank: int, client: bytes, server: bytes) -> bytes:
    return proof(secret, role, rank.to_bytes(4, "little"), client, server)


def _check_secret(secret: bytes) -> None:
    if len(secret) < SECRET_SIZE:
        remedy = (
            f"use at least {SECRET_SIZE} random bytes, e.g. {SECRET} or --secret-file of: "
            f"openssl rand -hex {SECRET_SIZE}"
        )
        raise ConfigError("secret", f"{len(secret)} bytes", "is too short", remedy)
