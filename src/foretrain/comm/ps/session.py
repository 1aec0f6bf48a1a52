"""Authenticated sessions between workers and servers: a handshake with the job's secret, then a tag on every message.

    worker → server   HELLO    rank, 32-byte nonce C
    server → worker   CHALLENGE    32-byte nonce S
    worker → server   PROOF    HMAC-SHA256(secret, "worker" ‖ rank ‖ shard ‖ C ‖ S ‖ job), the job's name
    server → worker   WELCOME  HMAC-SHA256(secret, "server" ‖ rank ‖ shard ‖ C ‖ S)
            or        REFUSED  HMAC-SHA256(secret, "refusal" ‖ rank ‖ shard ‖ C ‖ S ‖ flag ‖ why), why

As in `foretrain.comm.coordinator.handshake` the server proves itself last, so that an unauthenticated peer never gets a
MAC of its choosing. Each direction has a key derived from both nonces, and every later message a tag: AES-128-GMAC over
header and payload, with the message's place in its direction as nonce. An altered, replayed, missing, reflected or
forged message has a wrong tag or place. A worker has two connections to each server, so that short urgent messages do
not wait behind gradients; the handshake runs on one, and the other has its own keys from the same nonces. GMAC costs
little (26 GB/s with AES instructions, where HMAC-SHA256 reaches 1.7), so that it is not optional; nothing is encrypted.
"""

from __future__ import annotations

import struct
import threading
import time
import weakref
from hmac import compare_digest
from typing import Any, ClassVar, Final

import zmq
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from zmq.utils.garbage import gc

from foretrain.comm.coordinator.handshake import proof
from foretrain.comm.ps.frames import HEADER, TAG_SIZE, UNTAGGED, FrameKind, Header, Malformed, pack

NAME_SIZE: Final = 64
"""Most bytes of a job's name."""
_PLACE = struct.Struct("<4xQ")
_ROLE = struct.Struct("<II")
_SMALL: Final = 16 << 10
"""Most bytes of a payload that is copied for one call of the cipher instead of two."""

Payload = bytes | bytearray | memoryview


class Rejected(Malformed):
    """A message that parses but is forged, replayed, or out of its place."""


def session_proof(
    secret: bytes, role: str, rank: int, shard: int, worker: bytes, server: bytes, payload: bytes = b""
) -> bytes:
    """Return the proof that the sender of ``payload`` knows ``secret``.

    ``role`` is "worker", "server" or "refusal"; ``worker`` and ``server`` are the nonces of HELLO and CHALLENGE.
    """
    return proof(secret, role, _ROLE.pack(rank, shard), worker, server, payload)


def untagged(kind: FrameKind, sender: int, payload: bytes = b"", flag: int = 0) -> list[bytes]:
    """Return the frames of a message before there is a key."""
    return [pack(Header(kind, flag, sender, size=len(payload))) + bytes(TAG_SIZE), payload]


class AuthenticatedSession:
    """Session at one end of an authenticated connection.

    Args:
        secret: the job's.
        rank: the worker's.
        shard: the server's number.
        worker: the nonce of HELLO.
        server: the nonce of CHALLENGE.
        serves: whether this is the server's end.
        aside: whether it is the session of the second connection, see `foretrain.comm.ps.frames.ASIDE`.
    """

    def __init__(
        self, secret: bytes, rank: int, shard: int, worker: bytes, server: bytes, *, serves: bool, aside: bool = False
    ) -> None:
        what = "key aside" if aside else "key"
        keys = [
            session_proof(secret, f"{what} of the {sender}", rank, shard, worker, server)[:16]
            for sender in ("worker", "server")
        ]
        self._seals, self._opens = map(_Tags, reversed(keys) if serves else keys)
        self._own, self._other = (shard, rank) if serves else (rank, shard)
        self._sent = self._heard = 0

    def seal(self, header: Header, payload: Payload = b"") -> bytes:
        """Return the first frame of a message: ``header`` with sender and place, and the tag."""
        packed = pack(header._replace(sender=self._own, sequence=self._sent))
        tag = self._seals.of(self._sent, packed, payload)
        self._sent += 1
        return packed + tag

    def open(self, header: Header, tag: bytes, payload: Payload) -> None:
        """Accept a message as the next of this session.

        Raises:
            Rejected: it is forged or altered ("tag"), a duplicate ("replay"), or others before it are missing ("gap"),
                after which the session is useless.
        """
        if header.kind in UNTAGGED:
            raise Rejected("kind", f"{header.kind.name} within a session")
        if not compare_digest(self._opens.of(header.sequence, pack(header), payload), tag):
            raise Rejected("tag", f"{header.kind.name} of {header.sender} with a wrong tag")
        if header.sender != self._other:
            raise Rejected("sender", f"{header.kind.name} of {header.sender} in the session of {self._other}")
        if header.sequence < self._heard:
            raise Rejected("replay", f"{header.kind.name} of {header.sender}, message {header.sequence}, once more")
        if header.sequence > self._heard:
            missing = header.sequence - self._heard
            raise Rejected("gap", f"{missing} messages of {header.sender} are missing before {header.kind.name}")
        self._heard += 1


class _Tags:
    """Tags of one direction. Small payloads are copied and tagged in one call, which is several times as fast; large
    ones are not copied.
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._small = algorithms.AES(key), AESGCM(key)

    def of(self, place: int, header: bytes, payload: Payload) -> bytes:
        assert len(header) == HEADER.size
        if len(payload) <= _SMALL:
            return self._small.encrypt(_PLACE.pack(place), b"", header + payload)
        gmac = Cipher(self._key, modes.GCM(_PLACE.pack(place))).encryptor()
        gmac.authenticate_additional_data(header)
        gmac.authenticate_additional_data(payload)
        gmac.finalize()
        return gmac.tag


_NAME: Final = b"foretrain"
_EVENTS: Final = "inproc://foretrain.zap-auth"
_HANDSHAKE_TIMEOUT: Final = 5000
"""ms."""
_BATCH: Final = 64
"""Most requests to answer in one turn."""
_FAILED: Final = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
"""Handshakes with another mechanism, or none; those with a wrong password are counted where it is checked."""


def _password(secret: bytes) -> bytes:
    return proof(secret, "ZeroMQ password").hex().encode()


def set_password(socket: zmq.Socket[Any], secret: bytes) -> None:
    """Set the password that ``socket`` of a worker sends wherever it connects."""
    socket.setsockopt(zmq.PLAIN_USERNAME, _NAME)
    socket.setsockopt(zmq.PLAIN_PASSWORD, _password(secret))


class ZapAuth:
    """Authenticator of one server's socket, alone in its context: checks the password in ZeroMQ's own handshake.

    Args:
        context: of ZeroMQ.
        secret: the job's.
        guarded: the socket, not yet bound.
    """

    def __init__(self, context: zmq.Context[Any], secret: bytes, guarded: zmq.Socket[Any]) -> None:
        self._password = _password(secret)
        self._guarded = guarded
        self._asked = context.socket(zmq.REP)
        self._asked.bind("inproc://zeromq.zap.01")
        guarded.setsockopt(zmq.PLAIN_SERVER, 1)
        guarded.setsockopt(zmq.ZAP_DOMAIN, _NAME)
        guarded.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_TIMEOUT)
        guarded.monitor(_EVENTS, _FAILED)
        self._failed = context.socket(zmq.PAIR)
        # A full queue of events would block ZeroMQ's thread, and with it all traffic of the server.
        self._failed.setsockopt(zmq.RCVHWM, 0)
        self._failed.connect(_EVENTS)

    @property
    def sockets(self) -> tuple[zmq.Socket[Any], ...]:
        """Return the sockets to poll; call `answer` when any of them is readable."""
        return self._asked, self._failed

    def answer(self) -> list[str]:
        """Admit or reject some pending connections; return a text about each that was rejected."""
        rejected = []
        for _ in range(_BATCH):
            if not self._failed.poll(0):
                break
            self._failed.recv_multipart()
            rejected.append("somebody who is no worker, or one of another version")
        for _ in range(_BATCH):
            if not self._asked.poll(0):
                break
            version, request, _, address, _, mechanism, *credentials = self._asked.recv_multipart()
            right = mechanism == b"PLAIN" and len(credentials) == 2 and compare_digest(credentials[1], self._password)
            if not right:
                rejected.append(f"{address.decode(errors='replace')} does not know the job's secret")
            self._asked.send_multipart([version, request, b"200" if right else b"400", b"", b"", b""])
        return rejected

    def close(self) -> None:
        """Stop, before the guarded socket is closed."""
        self._guarded.disable_monitor()
        self._failed.close(0)
        self._asked.close(0)


_RELEASE_TIMEOUT: Final = 0.5
"""Seconds for buffers of sent messages to be released."""


class ZeroCopy:
    """Share of one owner of sockets in pyzmq's zero-copy sends, from before the first until its context has ended.

    pyzmq releases buffers through a thread and a socket of the whole process, its collector. It makes them in the first
    zero-copy send, without a lock: two threads that send first at the same time make two sockets, and pyzmq closes one
    to which ZeroMQ's threads still write, which crashes the process. So does stopping them while another thread sends.
    """

    _lock: ClassVar = threading.Lock()
    _owners: ClassVar[weakref.WeakSet[ZeroCopy]] = weakref.WeakSet()

    def __init__(self) -> None:
        with self._lock:
            self._owners.add(self)
            zmq.Frame(b"\0", copy=False)  # makes thread and socket

    def close(self) -> None:
        """Stop pyzmq's collector if no other owner needs it and it keeps no buffer. Idempotent."""
        with self._lock:
            self._owners.discard(self)
            deadline = time.monotonic() + _RELEASE_TIMEOUT
            while not self._owners and gc.refs and time.monotonic() < deadline:
                time.sleep(1e-3)
            if not self._owners and not gc.refs:
                gc.stop()
