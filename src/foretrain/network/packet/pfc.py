"""Priority flow control (IEEE 802.1Qbb), and buffers that the ports of a switch share: what couples its ports.

A packet that waits counts for the link that it came over. Where those of a class exceed XOFF the node before that link
is asked to pause it, where they have fallen to XON it may go on. The frame takes what the link takes, before all else.
"""

from __future__ import annotations

from foretrain.network.packet import state as c
from foretrain.network.packet.jit import inside
from foretrain.network.packet.packets import take_free

FRAME = 84
"""Bytes of a pause frame on the wire."""


@inside
def ask(m, kind, came, of, time):
    """Makes a frame of ``kind`` for the port of link ``came``, of class ``of``."""
    p = take_free(m)
    m[p + c.TIME] = time + m[came + c.DELAY] + (FRAME * m[came + c.RATE] >> 16)
    m[p + c.WORD] = kind << c.KIND_SHIFT | of << c.CLASS_SHIFT
    m[p + c.SEQUENCE] = came
    m[p + c.TIE] = c.OWN + (m[came + c.NUMBER] << 8) + (of << 4) + kind
    m[c.ASKING] = p


@inside
def waits(m, p, link, of, size, time):
    """Packet ``p`` has come into a queue of ``link``, whose node is coupled."""
    at, row = m[link + c.NODE], m[link + c.SETTING]
    m[at + c.POOL] += size
    m[at + c.WAITING] += 1
    came = m[p + c.TIE]
    if came < c.OWN:
        m[came + c.HELD + of] += size
        if m[came + c.HELD + of] > m[row + c.XOFF + of] and not m[came + c.ASKED] >> of & 1:
            m[came + c.ASKED] |= 1 << of
            m[c.PAUSES] += 1
            ask(m, c.PAUSE, came, of, time)


@inside
def leaves(m, p, link, of, size, time):
    """Packet ``p`` has left a queue of ``link``, whose node is coupled."""
    at, row = m[link + c.NODE], m[link + c.SETTING]
    m[at + c.POOL] -= size
    m[at + c.WAITING] -= 1
    came = m[p + c.TIE]
    if came < c.OWN:
        m[came + c.HELD + of] -= size
        if m[came + c.ASKED] >> of & 1 and m[came + c.HELD + of] <= m[row + c.XON + of]:
            m[came + c.ASKED] &= ~(1 << of)
            ask(m, c.RESUME, came, of, time)


@inside
def is_pause(m, p):
    """Whether ``p`` is a frame that pauses a port or has it go on."""
    kind = m[p + c.WORD] >> c.KIND_SHIFT & c.KIND_MASK
    return kind == c.PAUSE or kind == c.RESUME


@inside
def obey(m, p, link):
    """The port of ``link`` pauses, or goes on, as frame ``p`` says."""
    word = m[p + c.WORD]
    bit = 1 << (word >> c.CLASS_SHIFT & c.CLASS_MASK)
    if word >> c.KIND_SHIFT & c.KIND_MASK == c.PAUSE:
        m[link + c.PAUSED] |= bit
    else:
        m[link + c.PAUSED] &= ~bit
        # What waited can go from now on, not from when the port became free.
        m[link + c.BUSY] = max(m[link + c.BUSY], m[p + c.TIME])
