"""The one protocol of all transports, and which of them a flow has.

    sender:    `begin` before its first step · `more` when steps may go · `answered` when a reply comes
               · `woken` by its timer · `paced` when its rate allows a packet
    receiver:  `came` when data or a probe comes: it answers, and says how many steps have come · `drawn` when its host
               may pull a packet

A flow that was cancelled is SILENT: it does nothing, and what comes for it is thrown away.

What comes is the hosts' business, and so is who waits for whom.
"""

from __future__ import annotations

from foretrain.network.jit import inside
from foretrain.network.packet import state as c
from foretrain.network.packet.host_tx import set_alarm
from foretrain.network.packet.packets import give_back
from foretrain.network.packet.transports import bounded, go_back_n, ndp, newreno, pfabric


@inside
def begin(m, x, f):
    """Flow ``f`` will send for the first time."""
    flavour = m[f + c.FLAVOUR]
    if flavour == c.WINDOWED:
        newreno.begin(m, x, f)
    elif flavour == c.NEAREST_FIRST:
        pfabric.begin(m, x, f)
    elif flavour == c.PULLED:
        ndp.begin(m, x, f)
    elif flavour == c.IN_ORDER:
        go_back_n.begin(m, x, f)
    elif flavour == c.BOUNDED:
        bounded.begin(m, x, f)


@inside
def more(m, x, f, time):
    """More steps of flow ``f`` may go."""
    flavour = m[f + c.FLAVOUR]
    if flavour == c.WINDOWED:
        newreno.more(m, x, f, time)
    elif flavour == c.NEAREST_FIRST:
        pfabric.more(m, x, f, time)
    elif flavour == c.PULLED:
        ndp.more(m, x, f, time)
    elif flavour == c.IN_ORDER:
        go_back_n.more(m, x, f, time)
    elif flavour == c.BOUNDED:
        bounded.more(m, x, f, time)


@inside
def came(m, x, p, f, kind, time):
    """Packet ``p`` of ``kind``, which the receiver keeps, has come to it; how many steps have."""
    flavour = m[f + c.FLAVOUR]
    if flavour == c.WINDOWED:
        return newreno.came(m, x, p, f, time)
    if flavour == c.NEAREST_FIRST:
        return pfabric.came(m, x, p, f, time)
    if flavour == c.PULLED:
        return ndp.came(m, x, p, f, time)
    if flavour == c.IN_ORDER:
        return go_back_n.came(m, x, p, f, time)
    if flavour == c.BOUNDED:
        return bounded.came(m, x, p, f, kind, time)
    give_back(m, p)
    return m[f + c.DONE]


@inside
def avoid(m, x, f, word):
    """The way that a reply repeats met congestion, or did not."""
    if m[f + c.FORTHS] == 1 or x[m[f + c.TRANSPORT] + c.ADAPTIVE] == 0.0:
        return
    bit = 1 << (word >> c.ROUTE_SHIFT & 63)
    if word & c.MARKED:
        m[f + c.AVOID] |= bit
    else:
        m[f + c.AVOID] &= ~bit


@inside
def answered(m, x, p, f, kind, time):
    """Reply ``p`` of ``kind`` has come to the sender of flow ``f``."""
    flavour = m[f + c.FLAVOUR]
    if kind == c.ACK:
        avoid(m, x, f, m[p + c.WORD])
    if flavour == c.WINDOWED:
        newreno.answered(m, x, p, f, time)
    elif flavour == c.NEAREST_FIRST:
        pfabric.answered(m, x, p, f, time)
    elif flavour == c.PULLED:
        ndp.answered(m, x, p, f, kind, time)
    elif flavour == c.IN_ORDER:
        go_back_n.answered(m, x, p, f, kind, time)
    elif flavour == c.BOUNDED:
        bounded.answered(m, x, p, f, kind, time)


@inside
def woken(m, x, f, time):
    """The timer of flow ``f`` is looked at."""
    if time < m[f + c.DUE]:
        # What came since has moved it.
        set_alarm(m, f, m[f + c.DUE])
        return
    flavour = m[f + c.FLAVOUR]
    if flavour == c.WINDOWED:
        newreno.timed_out(m, x, f, time)
    elif flavour == c.NEAREST_FIRST:
        pfabric.timed_out(m, x, f, time)
    elif flavour == c.PULLED:
        ndp.timed_out(m, x, f, time)
    elif flavour == c.IN_ORDER:
        go_back_n.timed_out(m, x, f, time)
    elif flavour == c.BOUNDED:
        bounded.timed_out(m, x, f, time)


@inside
def paced(m, x, f, time):
    """The rate of flow ``f`` allows its next packet."""
    if m[f + c.FLAVOUR] == c.IN_ORDER:
        go_back_n.paced(m, x, f, time)
    elif m[f + c.FLAVOUR] == c.BOUNDED:
        bounded.paced(m, x, f, time)


@inside
def drawn(m, x, node, time):
    """Host ``node`` may pull a packet."""
    ndp.drawn(m, x, node, time)
