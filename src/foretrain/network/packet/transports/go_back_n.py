"""RoCE: packets at a rate, taken in order only; from a missing one on, everything is sent again (go-back-N).

The rate is DCQCN's or TIMELY's, in the files beside. Receivers acknowledge every packet that they take, ask once for
the one that is missing, and send a notice for marked packets, at most one in a while (DCQCN, 3.2). Meant for networks
that pause rather than drop: set ``xoff`` of `foretrain.network.packet.Queues`.
"""

from __future__ import annotations

from foretrain.network.jit import inside
from foretrain.network.packet import state as c
from foretrain.network.packet.host_tx import answer, send_data, set_alarm, signal
from foretrain.network.packet.packets import record
from foretrain.network.packet.transports.rates import delay_next, on_ack, on_notice, pace, sent, start

QUIET = c.LAWS + 10
"""Parameter: ps between two notices."""


@inside
def begin(m, x, f):
    """Initialise flow ``f``."""
    start(m, x, f)
    m[f + c.NACKED] = m[f + c.NOTICED] = -1


@inside
def wait(m, x, f, time):
    """Restart the timer of flow ``f``."""
    set_alarm(m, f, time + int(x[m[f + c.TRANSPORT] + c.LEAST_TIMEOUT]))


@inside
def sendable(m, x, f):
    """Return whether flow ``f`` has a packet that it may send."""
    end = m[f + c.FIRST_UNKNOWN] + int(x[m[f + c.TRANSPORT] + c.MOST])
    return m[f + c.NEXT_NEW] < min(end, m[f + c.ALLOWED] * m[f + c.PACKETS])


@inside
def more(m, x, f, time):
    """Send, if steps or the receiver allow it."""
    if sendable(m, x, f):
        pace(m, x, f, time)


@inside
def on_pace(m, x, f, time):
    """Send the next packet."""
    m[f + c.PACING] = 0
    if not sendable(m, x, f):
        return
    sequence = m[f + c.NEXT_NEW]
    m[f + c.NEXT_NEW] = sequence + 1
    size = send_data(m, x, f, sequence, 0, time)
    sent(m, x, f, size, time)
    delay_next(m, x, f, size, time)
    if m[f + c.DUE] < 0:
        wait(m, x, f, time)
    more(m, x, f, time)


@inside
def on_data(m, x, p, f, time):
    """Take data packet ``p`` if it is the next one; return how many steps have arrived."""
    way = m[f + c.TRANSPORT]
    sequence, expected = m[p + c.SEQUENCE], m[f + c.EXPECTED]
    if m[p + c.WORD] & c.MARKED:
        quiet = x[way + QUIET]
        if quiet > 0.0 and (m[f + c.NOTICED] < 0 or time >= m[f + c.NOTICED] + quiet):
            m[f + c.NOTICED] = time
            signal(m, f, c.NOTICE, m[f + c.ACK_PATH], int(x[way + c.REPLY_SIZE]), 0, 0, time)
    if sequence == expected:
        record(m, f, p)
    missing = sequence > expected or (sequence == expected and m[f + c.EXPECTED] == expected)
    if missing and m[f + c.NACKED] != expected:
        m[f + c.NACKED] = expected
        answer(m, x, p, f, c.NACK, expected, time)
    else:
        answer(m, x, p, f, c.ACK, m[f + c.EXPECTED], time)
    return m[f + c.EXPECTED] // m[f + c.PACKETS]


@inside
def on_reply(m, x, p, f, kind, time):
    """Process a notice, an acknowledgement, or a request for a packet."""
    if kind == c.NOTICE:
        on_notice(m, x, f, time)
        return
    expected = m[p + c.INFO]
    on_ack(m, x, f, 0, m[p + c.WORD] & c.MARKED, time - m[p + c.STAMP])
    if expected > m[f + c.FIRST_UNKNOWN]:
        m[f + c.FIRST_UNKNOWN] = expected
        m[f + c.NEXT_NEW] = max(m[f + c.NEXT_NEW], expected)
        if expected < m[f + c.NEXT_NEW]:
            wait(m, x, f, time)
        else:
            m[f + c.DUE] = -1
    if kind == c.NACK and expected == m[f + c.FIRST_UNKNOWN]:
        m[f + c.NEXT_NEW] = expected
    more(m, x, f, time)


@inside
def on_timeout(m, x, f, time):
    """Send everything from the first unacknowledged packet on again."""
    m[f + c.TIMEOUTS] += 1
    m[f + c.DUE] = -1
    m[f + c.NEXT_NEW] = m[f + c.FIRST_UNKNOWN]
    more(m, x, f, time)
