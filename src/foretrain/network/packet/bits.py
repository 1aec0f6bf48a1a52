"""One bit for each packet of a flow: what has come, and what its sender knows. A word of memory holds 32."""

from __future__ import annotations

from foretrain.network.packet import state as c
from foretrain.network.packet.jit import inside

FULL_WORD = (1 << 32) - 1


@inside
def is_set(m, at):
    """Whether bit ``at`` is."""
    return m[at >> 5] >> (at & 31) & 1


@inside
def put(m, at):
    """Sets bit ``at``."""
    m[at >> 5] |= 1 << (at & 31)


@inside
def take(m, at):
    """Clears bit ``at``."""
    m[at >> 5] &= ~(1 << (at & 31))


@inside
def first_unset(m, at, end):
    """The first bit from ``at`` on that is not set, or ``end``."""
    while at < end:
        if not at & 31 and m[at >> 5] == FULL_WORD:
            at += 32
        elif is_set(m, at):
            at += 1
        else:
            return at
    return end


@inside
def first_set(m, at, end):
    """The first bit from ``at`` on that is set, or ``end``."""
    while at < end:
        if not at & 31 and m[at >> 5] == 0:
            at += 32
        elif is_set(m, at):
            return at
        else:
            at += 1
    return end


@inside
def record(m, f, p):
    """Packet ``p`` of flow ``f`` has come; whether it had not before. Without its data it has not."""
    sequence = m[p + c.SEQUENCE]
    at = m[f + c.BITS] + sequence
    if m[p + c.WORD] & c.CUT or is_set(m, at):
        return False
    put(m, at)
    if sequence == m[f + c.EXPECTED]:
        end = m[f + c.BITS] + m[f + c.PACKETS] * m[f + c.STEPS]
        m[f + c.EXPECTED] = first_unset(m, at + 1, end) - m[f + c.BITS]
    return True
