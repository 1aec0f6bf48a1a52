"""TCP NewReno (RFC 5681, 6298, 6582), counted in packets, and DCTCP (Alizadeh et al., SIGCOMM 2010; RFC 8257).

Departures: no handshake; the initial window is a parameter (RFC 6928 has 10); every packet is acknowledged at once; the
timer's least value is a parameter, as data centres set it far below RFC 6298's second. With DCTCP's gain set, the
window shrinks by half of the share of packets that were marked; every acknowledgement repeats the mark of the packet
that it answers, so that no state machine for delayed ones is needed. α begins at 1 (RFC 8257, 4.2).
"""

from __future__ import annotations

from foretrain.network.jit import inside
from foretrain.network.packet import state as c
from foretrain.network.packet.host_tx import answer, measure, send_data, set_alarm, timeout
from foretrain.network.packet.packets import record


@inside
def marked(m, x, f, expected, fresh, mark):
    """Count an acknowledgement of ``fresh`` packets, marked or not; once a window, update α and react to marks.

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


OPEN, RECOVERING = 0, 1


@inside
def begin(m, x, f):
    """Initialise flow ``f``."""
    way = m[f + c.TRANSPORT]
    x[f + c.WINDOW] = x[way + c.FIRST_WINDOW]
    x[f + c.THRESHOLD] = x[way + c.MOST]
    x[f + c.ALPHA] = 1.0
    m[f + c.RECOVER] = -1


@inside
def more(m, x, f, time):
    """Send what the window allows."""
    end = m[f + c.FIRST_UNKNOWN] + int(min(x[f + c.WINDOW], x[m[f + c.TRANSPORT] + c.MOST]))
    end = min(end, m[f + c.ALLOWED] * m[f + c.PACKETS])
    if m[f + c.NEXT_NEW] >= end:
        return
    idle = m[f + c.NEXT_NEW] == m[f + c.FIRST_UNKNOWN]
    while m[f + c.NEXT_NEW] < end:
        sequence = m[f + c.NEXT_NEW]
        m[f + c.NEXT_NEW] = sequence + 1
        send_data(m, x, f, sequence, 0, time)
    if idle:
        set_alarm(m, f, time + timeout(m, x, f))


@inside
def grow(m, x, f, packets):
    """Grow the window by ``packets`` acknowledged ones: slow start below the threshold, one a round trip above."""
    window = x[f + c.WINDOW]
    if window < x[f + c.THRESHOLD]:
        window = min(window + packets, max(x[f + c.THRESHOLD], window))
    else:
        window += packets / window
    x[f + c.WINDOW] = min(window, x[m[f + c.TRANSPORT] + c.MOST])


@inside
def on_data(m, x, p, f, time):
    """Acknowledge data packet ``p`` of flow ``f``; return how many steps have arrived."""
    record(m, f, p)
    expected = m[f + c.EXPECTED]
    answer(m, x, p, f, c.ACK, expected, time)
    return expected // m[f + c.PACKETS]


@inside
def on_reply(m, x, p, f, time):
    """Process acknowledgement ``p``: the receiver of flow ``f`` expects the packet that it names."""
    expected, mark = m[p + c.INFO], m[p + c.WORD] & c.MARKED
    way = m[f + c.TRANSPORT]
    fresh = expected - m[f + c.FIRST_UNKNOWN]
    if x[way + c.GAIN] > 0.0:
        marked(m, x, f, expected, max(fresh, 0), mark)
    if fresh > 0:
        measure(m, x, f, time - m[p + c.STAMP])
        m[f + c.FIRST_UNKNOWN] = expected
        m[f + c.NEXT_NEW] = max(m[f + c.NEXT_NEW], expected)
        m[f + c.BACKOFF] = m[f + c.DUPLICATES] = 0
        if m[f + c.PHASE] == RECOVERING:
            if expected > m[f + c.RECOVER]:
                m[f + c.PHASE] = OPEN
                x[f + c.WINDOW] = x[f + c.THRESHOLD]
            else:
                # A partial acknowledgement: the next is missing, too, and what came has left the network.
                send_data(m, x, f, expected, 0, time)
                x[f + c.WINDOW] = max(x[f + c.WINDOW] - fresh + 1.0, 1.0)
        elif not mark or x[way + c.GAIN] == 0.0:
            grow(m, x, f, fresh)
        if expected < m[f + c.NEXT_NEW]:
            set_alarm(m, f, time + timeout(m, x, f))
        else:
            m[f + c.DUE] = -1
    elif m[f + c.FIRST_UNKNOWN] < m[f + c.NEXT_NEW] and expected == m[f + c.FIRST_UNKNOWN]:
        m[f + c.DUPLICATES] += 1
        if m[f + c.PHASE] == RECOVERING:
            x[f + c.WINDOW] += 1.0
        elif m[f + c.DUPLICATES] == int(x[way + c.REORDERING]) and expected > m[f + c.RECOVER]:
            flying = m[f + c.NEXT_NEW] - expected
            m[f + c.PHASE], m[f + c.RECOVER] = RECOVERING, m[f + c.NEXT_NEW] - 1
            x[f + c.THRESHOLD] = max(flying / 2.0, 2.0)
            x[f + c.WINDOW] = x[f + c.THRESHOLD] + x[way + c.REORDERING]
            send_data(m, x, f, expected, 0, time)
            set_alarm(m, f, time + timeout(m, x, f))
    more(m, x, f, time)


@inside
def on_timeout(m, x, f, time):
    """Send all that is not acknowledged again, slowly."""
    m[f + c.TIMEOUTS] += 1
    x[f + c.THRESHOLD] = max((m[f + c.NEXT_NEW] - m[f + c.FIRST_UNKNOWN]) / 2.0, 2.0)
    x[f + c.WINDOW] = 1.0
    m[f + c.PHASE], m[f + c.DUPLICATES] = OPEN, 0
    m[f + c.RECOVER] = m[f + c.NEXT_NEW] - 1
    m[f + c.BACKOFF] += 1
    m[f + c.NEXT_NEW] = m[f + c.FIRST_UNKNOWN]
    more(m, x, f, time)
