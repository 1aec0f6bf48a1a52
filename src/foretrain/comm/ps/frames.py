"""Messages between workers and servers: a header of fixed layout, its tag, and raw bytes of one range or several.

A message is a prefix of 64 bytes, its payload's length, header and tag, and the payload, sent from where it is.
Nothing is pickled. `foretrain.comm.ps.wire` carries messages, and makes and checks their tags.

A connection begins with a handshake with the job's secret:

    worker → server   HELLO    rank, 32-byte nonce C
    server → worker   CHALLENGE    32-byte nonce S
    worker → server   PROOF    HMAC-SHA256(secret, "worker" ‖ rank ‖ shard ‖ C ‖ S ‖ job), the job's name
    server → worker   WELCOME  HMAC-SHA256(secret, "server" ‖ rank ‖ shard ‖ C ‖ S)
            or        REFUSED  HMAC-SHA256(secret, "refusal" ‖ rank ‖ shard ‖ C ‖ S ‖ flag ‖ why), why
            or        STRANGER

As in `foretrain.comm.coordinator.handshake` the server proves itself last, so that an unauthenticated peer never gets a
MAC of its choosing; and who watches learns nothing that another handshake would accept, as each has nonces of its own.
Each direction of a connection has a key derived from both nonces, and every later message a tag: AES-128-GMAC over
prefix and payload, with the message's place in its direction as nonce. An altered, replayed, missing, reflected or
forged message has a wrong tag or place, and ends the connection. GMAC costs little where the machine multiplies
polynomials, so that it is not optional; nothing is encrypted.

A worker has two connections to each server, so that short urgent messages do not wait behind gradients. The second
one's handshake has the role "worker beside", and proves the nonces of the first in the place of the job's name.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from foretrain.comm.coordinator.handshake import NONCE_SIZE, PROOF_SIZE, proof
from foretrain.errors import Disagreement, ForetrainError, PeerLost

HEADER: Final = struct.Struct("<2sBBIQIQQQ")
"""magic, kind, flag, sender, sequence, part, step, offset, size; little-endian, 44 bytes."""
MAGIC: Final = b"fs"


class Malformed(ForetrainError):
    """Message that cannot be parsed or contradicts itself. ``reason`` is a word under which it is counted."""

    def __init__(self, reason: str, text: str) -> None:
        self.reason = reason
        super().__init__(text)


class FrameKind(IntEnum):
    """Kinds of messages. W: worker to server, S: server to worker; the first five and the last carry no tag."""

    HELLO = 1
    """W. Payload: a nonce; ``flag``: `BESIDE` on a worker's second connection."""
    CHALLENGE = 2
    """S. Payload: a nonce."""
    PROOF = 3
    """W. Payload: a proof that the worker knows the job's secret, and the job's name; on the second connection the
    nonces of the first."""
    WELCOME = 4
    """S. Payload: a proof that the server knows it, too; from here on messages have tags."""
    STRANGER = 5
    """S. The worker does not know the secret."""
    DECLARE = 6
    """W. Payload: declaration of all later rounds, see `foretrain.comm.ps.placement`; ``step``: number of earlier
    declarations; ``offset``: rounds of this one that the worker has begun."""
    PUSH = 7
    """W. Bytes ``[offset, offset + size)`` of ``part`` in round ``step``; without payload where `ABSENT`."""
    PULL = 8
    """W. Request for the sums of bytes that were pushed with `PULL_ONLY`."""
    VALUE = 9
    """S. Sums of pushed bytes; where optimizers run on servers, parameters after the update."""
    RECEIVED = 10
    """S. ``offset`` messages with pushes have arrived in this session since the DECLARE with this ``step``.
    W. ``size`` more bytes of values have arrived. Their credit returns."""
    ALIVE = 11
    """Both. The sender still runs."""
    FAIL = 12
    """Both. The job is over; ``flag``: the kind of error; payload: its text."""
    BYE = 13
    """Both. The sender closes in good order."""
    WANTED = 14
    """W. All earlier pushes were resent. S. Answer to that, and to DECLARE; ``offset``: random number of the server,
    another one after a restart; ``step``: where `STATEFUL`, rounds complete here."""
    DONE = 15
    """W. It has all sums, and pushes no more. S. So have all workers: no push has to be resent for them."""
    COMMITTED = 16
    """S., if `STATEFUL`. ``offset`` rounds are complete here; pushes of the first ``step`` are not needed again: they
    are in a snapshot, or would be lost anyway. With flag `CLOSED` so is that the worker has closed."""
    RULE = 17
    """W. Payload: hyperparameters of the optimizers on the servers, from round ``step`` on."""
    INIT = 18
    """W, rank 0. Frame ``step`` of ``offset`` of the initial state of ``part``, see
    `foretrain.plugins.torch.ps.server.parameter_store`."""
    GET_STATE = 19
    """W. Request for the state of ``part``, its optimizer's included."""
    STATE = 20
    """S. Frame of the present state of a part, as in INIT; empty, with ``offset`` 0, where all frames of an INIT have
    arrived."""
    LOST = 21
    """S. Worker ``part`` is lost: later sums are without it. W. This worker was told so in round ``step``, before this
    session; ``offset``: its present round."""
    REFUSED = 22
    """S. Instead of WELCOME. ``flag``: the kind of error, or `BUSY`; payload: a proof, and the reason as text."""


KINDS: Final = {int(kind): kind for kind in FrameKind}
ABSENT: Final = 1
"""Flag of a PUSH: the worker has no gradient there; of a VALUE: no worker has."""
ACCUMULATES: Final = 2
"""Flag of a PUSH: the round adds to the sums of the one before, as backward() ran again before step()."""
PULL_ONLY: Final = 4
"""Flag of a PUSH: its sum is sent only on a PULL."""
STATEFUL: Final = 8
"""Flag of a server's WANTED: it has a state that workers cannot restore."""
SEVERAL: Final = 16
"""Flag of a PUSH or a VALUE: it holds several ranges, see `bundle`."""
CLOSED: Final = 32
"""Flag of a COMMITTED: a restarted server will not wait for this worker."""
BESIDE: Final = 1
"""Flag of a HELLO: the connection is for the messages in `ASIDE`."""
RETURNS: Final = 128
"""Flag of a worker's BYE: it comes back soon with another declaration."""
BUSY: Final = 64
"""Flag of a REFUSED: the server serves another job, which has not ended."""
ASIDE: Final = frozenset((FrameKind.RECEIVED, FrameKind.ALIVE, FrameKind.FAIL))
"""Messages that must not wait behind gradients, and have a connection of their own."""
FAILURES: Final[tuple[type[ForetrainError], ...]] = (PeerLost, Disagreement)
"""Kinds of errors that end a job, by the flag of FAIL."""
_ANSWERS: Final = {FrameKind.CHALLENGE, FrameKind.WELCOME, FrameKind.REFUSED, FrameKind.STRANGER}
TO_SERVER: Final = frozenset(FrameKind) - _ANSWERS - {FrameKind.VALUE, FrameKind.STATE}
"""Messages that a worker may send."""


class Header(NamedTuple):
    """Fixed part of a message; `FrameKind` gives the meaning of the fields in each kind.

    Attributes:
        sender: the worker's rank, or the shard's number.
        sequence: messages of this session and direction before it.
        part: number of the part, counted over the whole job.
        step: round; of a DECLARE, number of earlier ones.
        offset: of the first byte, in the part.
    """

    kind: FrameKind
    flag: int = 0
    sender: int = 0
    sequence: int = 0
    part: int = 0
    step: int = 0
    offset: int = 0
    size: int = 0


def pack(header: Header) -> bytes:
    """Return ``header`` as it is sent."""
    return HEADER.pack(MAGIC, *header)


SMALL: Final = 64 << 10
"""Most bytes of a range that shares a message with others."""
_ENTRY: Final = struct.Struct("<QQQQ")


class Item(NamedTuple):
    """Bytes ``[offset, offset + size)`` of a part and their payload, which may be empty."""

    part: int
    offset: int
    size: int
    data: bytes | memoryview


def bundle(header: Header, items: Sequence[Item]) -> tuple[Header, tuple[bytes | memoryview, ...]]:
    """Return one message of ``items``, with kind, step and flags of ``header``, and its payload in pieces."""
    if len(items) == 1:
        (part, offset, size, data) = items[0]
        absent = 0 if len(data) else ABSENT
        return header._replace(flag=header.flag | absent, part=part, offset=offset, size=size), (data,)
    table = b"".join(_ENTRY.pack(part, offset, size, len(data)) for part, offset, size, data in items)
    size = sum(item.size for item in items)
    pieces = (table, *(item.data for item in items))
    return header._replace(flag=header.flag | SEVERAL, part=len(items), size=size), pieces


def unbundle(header: Header, payload: memoryview) -> list[Item]:
    """Return the ranges of a PUSH or VALUE; `Malformed` if its table does not fit its bytes."""
    if not header.flag & SEVERAL:
        if bool(header.flag & ABSENT) == bool(len(payload)):
            raise Malformed("size", f"{len(payload)} bytes where {header.size} are announced")
        return [Item(header.part, header.offset, header.size, payload)]
    at = header.part * _ENTRY.size
    if not 0 < at <= len(payload):
        raise Malformed("bundle", f"{header.part} ranges in a message of {len(payload)} bytes")
    items: list[Item] = []
    for part, offset, size, length in _ENTRY.iter_unpack(payload[:at]):
        items.append(Item(part, offset, size, payload[at : at + length]))
        at += length
    if at != len(payload):
        raise Malformed("bundle", f"a message of {len(payload)} bytes, whose table says {at}")
    return items


NAME_SIZE: Final = 64
"""Most bytes of a job's name, and the nonces of a session."""
REASON_SIZE: Final = 4000
"""Most bytes of a refusal's reason."""
HANDSHAKE_LIMIT: Final = PROOF_SIZE + REASON_SIZE
"""Most bytes of a message in a handshake."""
_ROLE = struct.Struct("<II")


class Keys(NamedTuple):
    """Keys of the messages of each end."""

    worker: bytes
    server: bytes


class Handshake(NamedTuple):
    """Identity of a handshake: the worker's rank, the server's shard, and both nonces."""

    rank: int
    shard: int
    worker: bytes
    server: bytes = b""

    @property
    def nonces(self) -> bytes:
        """Return both nonces, in `NAME_SIZE` bytes."""
        assert len(self.worker) + len(self.server) == 2 * NONCE_SIZE == NAME_SIZE
        return self.worker + self.server

    def proof(self, secret: bytes, role: str, payload: bytes = b"") -> bytes:
        """Return the proof that the sender of ``payload`` knows ``secret``.

        ``role`` is "worker", "worker beside", "server" or "refusal".
        """
        return proof(secret, role, _ROLE.pack(self.rank, self.shard), self.worker, self.server, payload)

    def keys(self, secret: bytes) -> Keys:
        """Return the keys of the messages that follow."""
        return Keys(*(self.proof(secret, f"key of the {sender}")[:16] for sender in ("worker", "server")))
