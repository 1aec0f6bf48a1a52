"""Messages between workers and servers: a header of fixed layout, its tag, and raw bytes, of one range or several.
Never pickled.

A message is one or two frames of ZeroMQ: header and tag, then the payload, if there is one, so that neither end copies
it. Who may say what is `foretrain.comm.ps.session`' to decide; here is only what a message looks like.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from foretrain.errors import Disagreement, ForetrainError, PeerLost

HEADER: Final = struct.Struct("<2sBBIQIQQQ")
"""magic, kind, flag, sender, sequence, part, step, offset, size; little-endian, 44 bytes."""
TAG_SIZE: Final = 16
"""Bytes of the tag behind the header."""
_MAGIC: Final = b"fs"


class Malformed(ForetrainError):
    """A message that cannot be parsed or makes no sense. ``reason`` is a word for counting it."""

    def __init__(self, reason: str, text: str) -> None:
        self.reason = reason
        super().__init__(text)


class FrameKind(IntEnum):
    """Kinds of messages. W: worker to server, S: server to worker; the first five and the last carry no tag."""

    HELLO = 1
    """W. Payload: a nonce."""
    CHALLENGE = 2
    """S. Payload: a nonce."""
    PROOF = 3
    """W. Payload: that the worker knows the job's secret, and the job's name."""
    WELCOME = 4
    """S. Payload: that the server does, too; the session begins."""
    STRANGER = 5
    """S. The server has no session with whom it answers: a connection was made anew, or the server was."""
    DECLARE = 6
    """W. Payload: what is exchanged from now on, see `foretrain.comm.ps.placement`; ``step``: how many came before;
    ``offset``: rounds of it that this worker has begun."""
    PUSH = 7
    """W. Bytes ``[offset, offset + size)`` of ``part`` in round ``step``; without payload where `ABSENT`."""
    PULL = 8
    """W. The sums of bytes that were pushed with `PULL_ONLY` are wanted now."""
    VALUE = 9
    """S. The same bytes, summed; or, of where optimizers run on servers, of the parameters after the update."""
    RECEIVED = 10
    """S. ``offset`` messages with pushes have come in this session since the DECLARE that came after ``step`` others.
    W. ``size`` bytes more of values have come. Their credit returns."""
    ALIVE = 11
    """Both. The sender still runs."""
    FAIL = 12
    """Both. The job is over; ``flag``: the kind of error; payload: why, as text."""
    BYE = 13
    """Both. The sender closes, and means to."""
    WANTED = 14
    """W. It has said again what was wanted; S. an answer to that, and to DECLARE; ``offset``: the server's number, and
    another one's when it is started anew; ``step``: where `STATEFUL`, rounds complete here."""
    DONE = 15
    """W. It has all sums, and pushes no more; S. so have all others: nobody needs to push again for them."""
    COMMITTED = 16
    """S., if `STATEFUL`. ``offset`` rounds are complete here; of ``step`` of them no push is needed again: they are
    in a snapshot, or would be lost anyway. With flag `CLOSED` so is that the worker has closed."""
    RULE = 17
    """W. Payload: hyperparameters of the optimizers on the servers; they hold from round ``step`` on."""
    INIT = 18
    """W, rank 0. Frame ``step`` of ``offset`` of what ``part`` begins with, see
    `foretrain.plugins.torch.ps.server.parameter_store`."""
    GET_STATE = 19
    """W. What ``part`` is now, its optimizer's state included, is wanted."""
    STATE = 20
    """S. The same as a INIT, as it is now; empty, with ``offset`` 0, where all frames of a INIT have come."""
    LOST = 21
    """S. Worker ``part`` is lost: sums from here on are without it. W. It has heard so in round ``step``, before this
    session; ``offset``: the round that it is in."""
    REFUSED = 22
    """S. Instead of WELCOME. ``flag``: the kind of error, or `BUSY`; payload: a proof, and why, as text."""


_KINDS: Final = {int(kind): kind for kind in FrameKind}
ABSENT: Final = 1
"""Flag of a PUSH: this worker has no gradient there; of a VALUE: no worker has."""
ACCUMULATES: Final = 2
"""Flag of a PUSH: the round adds to the sums of the one before, as backward() ran again before step()."""
PULL_ONLY: Final = 4
"""Flag of a PUSH: its sum is not to be sent before it is asked for with a PULL."""
STATEFUL: Final = 8
"""Flag of a server's WANTED: it has a state that workers cannot make anew."""
SEVERAL: Final = 16
"""Flag of a PUSH or a VALUE: it holds several ranges, see `foretrain.comm.ps.frames`."""
CLOSED: Final = 32
"""Flag of a COMMITTED: a server that is started anew will not wait for this worker."""
RETURNS: Final = 128
"""Flag of a worker's BYE: it comes back soon, with other things to exchange."""
BUSY: Final = 64
"""Flag of a REFUSED: another job is here, and has not ended."""
ASIDE: Final = frozenset((FrameKind.RECEIVED, FrameKind.ALIVE, FrameKind.FAIL))
"""What must not wait behind gradients, and has a connection of its own."""
FAILURES: Final[tuple[type[ForetrainError], ...]] = (PeerLost, Disagreement)
"""Kinds of errors that end a job, by the flag of FAIL."""
UNTAGGED: Final = frozenset(
    (FrameKind.HELLO, FrameKind.CHALLENGE, FrameKind.PROOF, FrameKind.WELCOME, FrameKind.STRANGER, FrameKind.REFUSED)
)
"""What is said before there is a key."""
_FROM_SERVER: Final = {
    FrameKind.CHALLENGE,
    FrameKind.WELCOME,
    FrameKind.REFUSED,
    FrameKind.STRANGER,
    FrameKind.VALUE,
    FrameKind.STATE,
}
TO_SERVER: Final = frozenset(FrameKind) - _FROM_SERVER
"""What a worker may say."""


class Header(NamedTuple):
    """Fixed part of a message; see `FrameKind` for what the fields mean in each.

    Attributes:
        kind: what it is.
        flag: a bit of it.
        sender: the worker's rank, or the shard's number.
        sequence: messages of this session and direction before it.
        part: which part of the shard, counted over the whole job.
        step: round; of a DECLARE, how many came before it.
        offset: of the first byte, in the part.
        size: bytes that it is about.
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
    """Return ``header`` as it is sent, without its tag."""
    return HEADER.pack(_MAGIC, *header)


def unpack(frame: bytes) -> tuple[Header, bytes]:
    """Return header and tag in the first frame of a message; `Malformed` if it cannot be parsed."""
    if len(frame) != HEADER.size + TAG_SIZE:
        raise Malformed("length", f"a header of {len(frame)} bytes instead of {HEADER.size + TAG_SIZE}")
    magic, kind, *rest = HEADER.unpack_from(frame)
    if magic != _MAGIC:
        raise Malformed("magic", f"a header that begins with {magic!r}")
    known = _KINDS.get(kind)
    if known is None:
        raise Malformed("kind", f"a message of unknown kind {kind}")
    return Header(known, *rest), frame[HEADER.size :]


SMALL: Final = 64 << 10
"""Bytes of a range that goes together with others, at most: copying them takes less than a message of their own."""
_ENTRY: Final = struct.Struct("<QQQQ")


class Item(NamedTuple):
    """Bytes ``[offset, offset + size)`` of a part and their payload, which is empty where there is none."""

    part: int
    offset: int
    size: int
    data: bytes | memoryview


def bundle(header: Header, items: Sequence[Item]) -> tuple[Header, bytes | memoryview]:
    """Return one message of ``items``, with kind, step and flags of ``header``."""
    if len(items) == 1:
        (part, offset, size, data) = items[0]
        absent = 0 if len(data) else ABSENT
        return header._replace(flag=header.flag | absent, part=part, offset=offset, size=size), data
    table = b"".join(_ENTRY.pack(part, offset, size, len(data)) for part, offset, size, data in items)
    size = sum(item.size for item in items)
    payload = b"".join((table, *(item.data for item in items)))
    return header._replace(flag=header.flag | SEVERAL, part=len(items), size=size), payload


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
