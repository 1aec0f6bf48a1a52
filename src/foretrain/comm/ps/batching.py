"""Several ranges in one message: what is small goes together, because a message costs more than its bytes.

    header (SEVERAL; part: how many; size: their bytes), how many × (part, offset, size, length), their bytes in order

``length`` is that of the range's payload, which is another than ``size`` where parameters are wider than gradients, and
0 where there is none (`foretrain.comm.ps.frames.ABSENT`). A message with one range has no table, and its bytes are not
copied.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from foretrain.comm.ps.frames import ABSENT, SEVERAL, Header, Malformed

SMALL: Final = 64 << 10
"""Bytes of a range that goes together with others, at most: copying them takes less than a message of their own."""
_ENTRY: Final = struct.Struct("<QQQQ")


class Item(NamedTuple):
    """Bytes ``[offset, offset + size)`` of a part, and what is said of them; empty where there is nothing to say."""

    part: int
    offset: int
    size: int
    data: bytes | memoryview


def bundle(header: Header, items: Sequence[Item]) -> tuple[Header, bytes | memoryview]:
    """One message of ``items``, with kind, step and flags of ``header``."""
    if len(items) == 1:
        (part, offset, size, data) = items[0]
        absent = 0 if len(data) else ABSENT
        return header._replace(flag=header.flag | absent, part=part, offset=offset, size=size), data
    table = b"".join(_ENTRY.pack(part, offset, size, len(data)) for part, offset, size, data in items)
    size = sum(item.size for item in items)
    payload = b"".join((table, *(item.data for item in items)))
    return header._replace(flag=header.flag | SEVERAL, part=len(items), size=size), payload


def unbundle(header: Header, payload: memoryview) -> list[Item]:
    """The ranges of a PUSH or VALUE; `Malformed` where its table and its bytes do not fit."""
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
