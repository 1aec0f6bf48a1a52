"""RoCE: packets at a rate, taken in order only; from one that is missing on, everything goes again (go-back-N).

The rate is DCQCN's or TIMELY's, in the files beside. Receivers acknowledge every packet that they take, ask once for
the one that is missing, and send a notice for marked packets, at most one in a while (DCQCN, 3.2). Meant for networks
that pause rather than drop: set ``xoff`` of `foretrain.network.packet.Queues`.
"""

from __future__ import annotations

from foretrain.network.jit import inside
from foretrain.network.packet import state as c
from foretrain.network.packet.host_tx import answer, send_data, set_alarm, signal
from foretrain.network.packet.packets import record
from foretrain.network.packet.transports.rates import heard, pace, sent, spent, start, warned

QUIET = c.LAWS + 10
"""Parameter: ps between two notices."""


@inside
def begin(m, x, f):
    """Flow ``f`` will send for the first time."""
    start(m, x, f)
    m[f + c.NACKED] = m[f + c.NOTICED] = -1


@inside
def wait(m, x, f, time):
    """The timer begins again."""
    set_alarm(m, f, time + int(x[m[f + c.TRANSPORT] + c.LEAST_TIMEOUT]))


@inside
def sendable(m, x, f):
    """Return whether flow ``f`` has a packet that it may send."""
    end = m[f + c.FIRST_UNKNOWN] + int(x[m[f + c.TRANSPORT] + c.MOST])
    return m[f + c.NEXT_NEW] < min(end, m[f + c.ALLOWED] * m[f + c.PACKETS])


@inside
def more(m, x, f, time):
    """Steps may go, or what held them back has come."""
    if sendable(m, x, f):
        pace(m, x, f, time)


@inside
def paced(m, x, f, time):
    """The next packet goes."""
    m[f + c.PACING] = 0
    if not sendable(m, x, f):
        return
    sequence = m[f + c.NEXT_NEW]
    m[f + c.NEXT_NEW] = sequence + 1
    size = send_data(m, x, f, sequence, 0, time)
    sent(m, x, f, size, time)
    spent(m, x, f, size, time)
    if m[f + c.DUE] < 0:
        wait(m, x, f, time)
    more(m, x, f, time)


@inside
def came(m, x, p, f, time):
    """Data packet ``p`` has come: it is taken where it is the next one; how many steps have come."""
    way = m[f + c.TRANSPORT]
    sequence, expected = m[p + c.SEQUENCE], m[f + c.EXPECTED]
    if m[p + c.WORD] & c.MARKED:
        quiet = x[way + QUIET]
        if quiet > 0.0 and (m[f + c.NOTICED] < 0 or time >= m[f + c.NOTICED] + quiet):
            m[f + c.NOTICED] = time
            signal(m, f, c.NOTICE, m[f + c.BACK], int(x[way + c.REPLY_SIZE]), 0, 0, time)
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
def answered(m, x, p, f, kind, time):
    """A notice, an acknowledgement, or what asks for a packet has come."""
    if kind == c.NOTICE:
        warned(m, x, f, time)
        return
    expected = m[p + c.INFO]
    heard(m, x, f, 0, m[p + c.WORD] & c.MARKED, time - m[p + c.STAMP])
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
def timed_out(m, x, f, time):
    """Nothing has come for a timer's time: from the first packet that is not acknowledged on everything goes again, and
    the receiver may ask again."""
    m[f + c.TIMEOUTS] += 1
    m[f + c.DUE] = -1
    m[f + c.NEXT_NEW] = m[f + c.FIRST_UNKNOWN]
    more(m, x, f, time)
