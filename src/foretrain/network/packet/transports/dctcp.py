"""DCTCP (Alizadeh et al., SIGCOMM 2010; RFC 8257): the window shrinks by half of the share of packets that were marked.

Losses, timers and growth are NewReno's, in the file beside. Every acknowledgement repeats the mark of the packet that
it answers, so that no state machine for delayed ones is needed. α begins at 1 (RFC 8257, 4.2).
"""

from __future__ import annotations

from foretrain.network.packet import state as c
from foretrain.network.packet.jit import inside


@inside
def marked(m, x, f, expected, fresh, mark):
    """An acknowledgement of ``fresh`` packets, marked or not: once a window α is updated, and marks have their effect.

    Departure: RFC 8257 counts bytes that are acknowledged, and a duplicate acknowledges none; here it counts as one
    packet, since it answers one.
    """
    packets = max(fresh, 1)
    m[f + c.ACKED] += packets
    if mark:
        m[f + c.ACKED_MARKED] += packets
    if expected <= m[f + c.WINDOW_END]:
        return
    gain = x[m[f + c.TRANSPORT] + c.GAIN]
    share = m[f + c.ACKED_MARKED] / m[f + c.ACKED]
    x[f + c.ALPHA] += gain * (share - x[f + c.ALPHA])
    if m[f + c.ACKED_MARKED] > 0:
        x[f + c.WINDOW] = max(x[f + c.WINDOW] * (1.0 - x[f + c.ALPHA] / 2.0), 1.0)
        x[f + c.THRESHOLD] = x[f + c.WINDOW]
    m[f + c.ACKED] = m[f + c.ACKED_MARKED] = 0
    m[f + c.WINDOW_END] = m[f + c.NEXT_NEW]
