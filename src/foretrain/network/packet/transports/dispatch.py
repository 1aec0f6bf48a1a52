"""Calls of a flow's transport.

    sender:    `begin` before its first step · `more` when steps may go · `on_reply` when a reply arrives
               · `on_timer` of its timer · `on_pace` when its rate allows a packet
    receiver:  `on_data` when data or a probe arrives: it answers, and returns how many steps have arrived · `on_pull`
               when its host may pull a packet

A flow that was cancelled is SILENT: it does nothing, and what arrives for it is thrown away.
"""

from __future__ import annotations

from foretrain.network.jit import inside
from foretrain.network.packet import state as c
from foretrain.network.packet.host_tx import set_alarm
from foretrain.network.packet.packets import give_back
from foretrain.network.packet.transports import bounded, go_back_n, ndp, newreno, pfabric


@inside
def begin(m, x, f):
    """Initialise flow ``f`` before it sends for the first time."""
    protocol = m[f + c.PROTOCOL]
    if protocol == c.WINDOWED:
        newreno.begin(m, x, f)
    elif protocol == c.NEAREST_FIRST:
        pfabric.begin(m, x, f)
    elif protocol == c.PULLED:
        ndp.begin(m, x, f)
    elif protocol == c.IN_ORDER:
        go_back_n.begin(m, x, f)
    elif protocol == c.BOUNDED:
        bounded.begin(m, x, f)


@inside
def more(m, x, f, time):
    """Let flow ``f`` send, because more steps are allowed."""
    protocol = m[f + c.PROTOCOL]
    if protocol == c.WINDOWED:
        newreno.more(m, x, f, time)
    elif protocol == c.NEAREST_FIRST:
        pfabric.more(m, x, f, time)
    elif protocol == c.PULLED:
        ndp.more(m, x, f, time)
    elif protocol == c.IN_ORDER:
        go_back_n.more(m, x, f, time)
    elif protocol == c.BOUNDED:
        bounded.more(m, x, f, time)


@inside
def on_data(m, x, p, f, kind, time):
    """Give packet ``p`` of ``kind`` to the receiver, which keeps it; return how many steps have arrived."""
    protocol = m[f + c.PROTOCOL]
    if protocol == c.WINDOWED:
        return newreno.on_data(m, x, p, f, time)
    if protocol == c.NEAREST_FIRST:
        return pfabric.on_data(m, x, p, f, time)
    if protocol == c.PULLED:
        return ndp.on_data(m, x, p, f, time)
    if protocol == c.IN_ORDER:
        return go_back_n.on_data(m, x, p, f, time)
    if protocol == c.BOUNDED:
        return bounded.on_data(m, x, p, f, kind, time)
    give_back(m, p)
    return m[f + c.DONE]


@inside
def avoid(m, x, f, word):
    """Note whether the path that a reply repeats met congestion."""
    if m[f + c.PATH_COUNT] == 1 or x[m[f + c.TRANSPORT] + c.ADAPTIVE] == 0.0:
        return
    bit = 1 << (word >> c.ROUTE_SHIFT & 63)
    if word & c.MARKED:
        m[f + c.AVOID] |= bit
    else:
        m[f + c.AVOID] &= ~bit


@inside
def on_reply(m, x, p, f, kind, time):
    """Give reply ``p`` of ``kind`` to the sender of flow ``f``."""
    protocol = m[f + c.PROTOCOL]
    if kind == c.ACK:
        avoid(m, x, f, m[p + c.WORD])
    if protocol == c.WINDOWED:
        newreno.on_reply(m, x, p, f, time)
    elif protocol == c.NEAREST_FIRST:
        pfabric.on_reply(m, x, p, f, time)
    elif protocol == c.PULLED:
        ndp.on_reply(m, x, p, f, kind, time)
    elif protocol == c.IN_ORDER:
        go_back_n.on_reply(m, x, p, f, kind, time)
    elif protocol == c.BOUNDED:
        bounded.on_reply(m, x, p, f, kind, time)


@inside
def on_timer(m, x, f, time):
    """Check the timer of flow ``f``."""
    if time < m[f + c.DUE]:
        # What came since has moved it.
        set_alarm(m, f, m[f + c.DUE])
        return
    protocol = m[f + c.PROTOCOL]
    if protocol == c.WINDOWED:
        newreno.on_timeout(m, x, f, time)
    elif protocol == c.NEAREST_FIRST:
        pfabric.on_timeout(m, x, f, time)
    elif protocol == c.PULLED:
        ndp.on_timeout(m, x, f, time)
    elif protocol == c.IN_ORDER:
        go_back_n.on_timeout(m, x, f, time)
    elif protocol == c.BOUNDED:
        bounded.on_timeout(m, x, f, time)


@inside
def on_pace(m, x, f, time):
    """Let flow ``f`` send the next packet that its rate allows."""
    if m[f + c.PROTOCOL] == c.IN_ORDER:
        go_back_n.on_pace(m, x, f, time)
    elif m[f + c.PROTOCOL] == c.BOUNDED:
        bounded.on_pace(m, x, f, time)


@inside
def on_pull(m, x, node, time):
    """Let host ``node`` pull a packet."""
    ndp.on_pull(m, x, node, time)
