"""pFabric's hosts (Alizadeh et al., SIGCOMM 2013, 4.2).

A window of a bandwidth-delay product from the start, selective acknowledgements, and losses that only a short timer
finds. Switches decide who goes first, by how many packets are left, which every packet says:
`foretrain.network.packet.queues`.

Departures: after timeouts in a row a whole packet is sent to see whether the path is free, not a header; what is left
is that of the allowed steps.
"""

from __future__ import annotations

from foretrain.network.jit import inside
from foretrain.network.packet import state as c
from foretrain.network.packet.host_tx import answer, send_data, set_alarm
from foretrain.network.packet.packets import first_unset, give_back, is_set, put, record


@inside
def begin(m, x, f):
    """Initialise flow ``f``."""
    way = m[f + c.TRANSPORT]
    x[f + c.WINDOW] = x[way + c.FIRST_WINDOW]
    x[f + c.THRESHOLD] = x[way + c.MOST]


@inside
def wait(m, x, f, time):
    """Restart the timer of flow ``f``."""
    set_alarm(m, f, time + int(x[m[f + c.TRANSPORT] + c.LEAST_TIMEOUT]))


@inside
def more(m, x, f, time):
    """Send what the window allows, except what has arrived."""
    end, window = m[f + c.ALLOWED] * m[f + c.PACKETS], int(x[f + c.WINDOW])
    idle = m[f + c.DUE] < 0
    while m[f + c.UNDER_WAY] < window and m[f + c.NEXT_NEW] < end:
        sequence = m[f + c.NEXT_NEW]
        m[f + c.NEXT_NEW] = sequence + 1
        if not is_set(m, m[f + c.KNOWN] + sequence):
            m[f + c.UNDER_WAY] += 1
            send_data(m, x, f, sequence, end - m[f + c.ACKED], time)
    if idle and m[f + c.UNDER_WAY] > 0:
        wait(m, x, f, time)


@inside
def on_data(m, x, p, f, time):
    """Acknowledge data packet ``p``, it alone; return how many steps have arrived."""
    if m[p + c.WORD] & c.CUT:
        give_back(m, p)
    else:
        record(m, f, p)
        answer(m, x, p, f, c.ACK, 0, time)
    return m[f + c.EXPECTED] // m[f + c.PACKETS]


@inside
def on_reply(m, x, p, f, time):
    """Note that the packet that ``p`` acknowledges has arrived."""
    at = m[f + c.KNOWN] + m[p + c.SEQUENCE]
    if not is_set(m, at):
        put(m, at)
        m[f + c.ACKED] += 1
        m[f + c.UNDER_WAY] = max(m[f + c.UNDER_WAY] - 1, 0)
        m[f + c.BACKOFF] = 0
        end = m[f + c.KNOWN] + m[f + c.TOP]
        first = m[f + c.KNOWN] + m[f + c.FIRST_UNKNOWN]
        m[f + c.FIRST_UNKNOWN] = first_unset(m, first, end) - m[f + c.KNOWN]
        window = x[f + c.WINDOW]
        window += 1.0 if window < x[f + c.THRESHOLD] else 1.0 / window
        x[f + c.WINDOW] = min(window, x[m[f + c.TRANSPORT] + c.MOST])
        if m[f + c.FIRST_UNKNOWN] < m[f + c.TOP]:
            wait(m, x, f, time)
        else:
            m[f + c.DUE] = -1
    more(m, x, f, time)


@inside
def on_timeout(m, x, f, time):
    """Send all that may be lost again, slowly."""
    m[f + c.TIMEOUTS] += 1
    m[f + c.BACKOFF] += 1
    x[f + c.THRESHOLD] = max(x[f + c.WINDOW] / 2.0, 2.0)
    # Once it may be an accident: half the window. Again and again, and nothing gets through: one packet.
    x[f + c.WINDOW] = x[f + c.THRESHOLD] if m[f + c.BACKOFF] == 1 else 1.0
    m[f + c.UNDER_WAY], m[f + c.DUE] = 0, -1
    m[f + c.NEXT_NEW] = m[f + c.FIRST_UNKNOWN]
    more(m, x, f, time)
