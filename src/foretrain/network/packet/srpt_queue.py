"""pFabric's queue (Alizadeh et al., SIGCOMM 2013, 4.1): what has the least to go of its flow goes first.

All classes share one short list, which is searched: of the flow of the packet with the least to go, the one that came
first is sent, so that no flow's packets overtake each other; what has the most to go is dropped where there is no room.
Replies go before all data.
"""

from __future__ import annotations

from foretrain.network.packet import state as c
from foretrain.network.packet.jit import inside
from foretrain.network.packet.packets import drop


@inside
def left(m, p):
    """Packets that the flow of ``p`` had to send when it went; -1 for what is no data."""
    return m[p + c.INFO] if m[p + c.WORD] >> c.KIND_SHIFT & c.KIND_MASK == c.DATA else -1


@inside
def unlink(m, link, ahead, p):
    """Takes ``p``, which is behind ``ahead`` (-1: it is the first), out of the list of ``link``."""
    if ahead < 0:
        m[link + c.HEAD] = m[p + c.NEXT]
    else:
        m[ahead + c.NEXT] = m[p + c.NEXT]
    if m[link + c.TAIL] == p:
        m[link + c.TAIL] = ahead
    size = m[p + c.WORD] & c.SIZE_MASK
    m[link + c.BYTES] -= size
    m[link + c.TOTAL] -= size
    if m[link + c.HEAD] < 0:
        m[link + c.MASK] = 0


@inside
def pick_nearest(m, link):
    """Takes the packet that ``link`` sends next out of its list."""
    p = m[link + c.HEAD]
    best, least = p, left(m, p)
    while p >= 0:
        if left(m, p) < least:
            best, least = p, left(m, p)
        p = m[p + c.NEXT]
    flow = m[best + c.WAY] >> 32
    ahead, p = -1, m[link + c.HEAD]
    while m[p + c.WAY] >> 32 != flow or (left(m, p) < 0) != (least < 0):
        ahead, p = p, m[p + c.NEXT]
    unlink(m, link, ahead, p)
    return p


@inside
def admit_nearest(m, p, link):
    """Puts ``p`` into the list of ``link``; what has the most to go makes room."""
    size = m[p + c.WORD] & c.SIZE_MASK
    m[link + c.SEEN] += 1
    while m[link + c.TOTAL] + size > m[m[link + c.SETTING] + c.ROOM]:
        worst, before_worst, most = -1, -1, left(m, p)
        ahead, q = -1, m[link + c.HEAD] if m[link + c.MASK] else -1
        while q >= 0:
            if left(m, q) > most:
                worst, before_worst, most = q, ahead, left(m, q)
            ahead, q = q, m[q + c.NEXT]
        if worst < 0:
            drop(m, p, link, 0)
            return
        unlink(m, link, before_worst, worst)
        drop(m, worst, link, 0)
    m[p + c.NEXT] = -1
    if m[link + c.MASK]:
        m[m[link + c.TAIL] + c.NEXT] = p
    else:
        m[link + c.HEAD], m[link + c.MASK] = p, 1
    m[link + c.TAIL] = p
    m[link + c.BYTES] += size
    m[link + c.TOTAL] += size
    m[link + c.TALLY + c.DEEPEST] = max(m[link + c.TALLY + c.DEEPEST], m[link + c.TOTAL])
