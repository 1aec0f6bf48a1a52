"""NDP (Handley et al., SIGCOMM 2017): a first window at once, and then each packet when its receiver pulls it.

Switches cut what does not fit to its header, so a receiver knows of every packet that was sent, asks for it again, and
pulls at the rate at which its link can take packets, from its flows in turn. Headers and replies are of class 0, data
of class 1 at least, so set ``strict=1`` or more at switches.

Departures: a switch always cuts what arrives, not now and then what came last; headers that find no room are dropped
and found by a timer, not returned to their sender. A step begins with a first window where the connection was idle.
"""

from __future__ import annotations

from foretrain.network.jit import inside
from foretrain.network.packet import state as c
from foretrain.network.packet.host_tx import answer, remind, send_data, set_alarm, signal
from foretrain.network.packet.packets import first_set, is_set, put, record, take


@inside
def begin(m, x, f):
    """Flow ``f`` will send for the first time."""
    m[f + c.CREDIT] = 0


@inside
def wait(m, x, f, time):
    """The timer begins again."""
    set_alarm(m, f, time + int(x[m[f + c.TRANSPORT] + c.LEAST_TIMEOUT]))


@inside
def more(m, x, f, time):
    """Steps may go: the first window of them at once, where nothing is under way."""
    if m[f + c.FIRST_UNKNOWN] == m[f + c.NEXT_NEW]:
        m[f + c.CREDIT] = int(x[m[f + c.TRANSPORT] + c.FIRST_WINDOW])
    spend(m, x, f, time)


@inside
def spend(m, x, f, time):
    """Sends what may go: first what was cut, then what is new."""
    end, first = m[f + c.ALLOWED] * m[f + c.PACKETS], m[f + c.KNOWN]
    while m[f + c.CREDIT] > 0:
        if m[f + c.AGAIN] > 0:
            sequence = first_set(m, first + m[f + c.AGAIN_FROM], first + m[f + c.TOP]) - first
            m[f + c.AGAIN_FROM] = sequence + 1
            m[f + c.AGAIN] -= 1
            take(m, first + sequence)
        elif m[f + c.NEXT_NEW] < end:
            sequence = m[f + c.NEXT_NEW]
            m[f + c.NEXT_NEW] = sequence + 1
        else:
            break
        m[f + c.CREDIT] -= 1
        send_data(m, x, f, sequence, 0, time)
    if m[f + c.DUE] < 0 and m[f + c.FIRST_UNKNOWN] < end:
        wait(m, x, f, time)


@inside
def came(m, x, p, f, time):
    """Packet ``p`` has come, or its header: it is acknowledged, or asked for; how many steps have come."""
    if m[p + c.WORD] & c.CUT:
        answer(m, x, p, f, c.NACK, m[f + c.EXPECTED], time)
    else:
        record(m, f, p)
        answer(m, x, p, f, c.ACK, m[f + c.EXPECTED], time)
    if m[f + c.EXPECTED] < m[f + c.PACKETS] * m[f + c.STEPS]:
        here = m[f + c.TARGET]
        if m[f + c.PULLS] == 0:
            line_up(m, x, f, here)
        m[f + c.PULLS] += 1
        if not m[here + c.PULLING]:
            m[here + c.PULLING] = 1
            remind(m, f, c.DRAW, 0, max(time, m[here + c.PULL_FREE]))
    return m[f + c.EXPECTED] // m[f + c.PACKETS]


@inside
def line_up(m, x, f, here):
    """Flow ``f`` is the last whose turn it is."""
    m[f + c.PULL_NEXT] = -1
    if m[here + c.PULL_FIRST] < 0:
        m[here + c.PULL_FIRST] = f
    else:
        m[m[here + c.PULL_LAST] + c.PULL_NEXT] = f
    m[here + c.PULL_LAST] = f


@inside
def drawn(m, x, here, time):
    """Host ``here`` pulls one packet, of the flow whose turn it is."""
    f = m[here + c.PULL_FIRST]
    m[here + c.PULL_FIRST] = m[f + c.PULL_NEXT]
    m[f + c.PULLS] -= 1
    if m[f + c.PULLS] > 0:
        line_up(m, x, f, here)
    signal(m, f, c.PULL, m[f + c.BACK], int(x[m[f + c.TRANSPORT] + c.REPLY_SIZE]), 0, 0, time)
    m[here + c.PULL_FREE] = time + (m[f + c.FULL] * m[f + c.LAST_RATE] >> 16)
    if m[here + c.PULL_FIRST] >= 0:
        remind(m, m[here + c.PULL_FIRST], c.DRAW, 0, m[here + c.PULL_FREE])
    else:
        m[here + c.PULLING] = 0


@inside
def again(m, x, f, sequence):
    """Packet ``sequence`` of flow ``f`` is to go again."""
    at = m[f + c.KNOWN] + sequence
    if sequence >= m[f + c.FIRST_UNKNOWN] and not is_set(m, at):
        put(m, at)
        m[f + c.AGAIN_FROM] = min(m[f + c.AGAIN_FROM], sequence) if m[f + c.AGAIN] > 0 else sequence
        m[f + c.AGAIN] += 1


@inside
def answered(m, x, p, f, kind, time):
    """An acknowledgement, what asks for a packet, or what pulls one has come."""
    if kind == c.PULL:
        m[f + c.CREDIT] += 1
    else:
        if m[p + c.INFO] > m[f + c.FIRST_UNKNOWN]:
            m[f + c.FIRST_UNKNOWN] = m[p + c.INFO]
        if kind == c.NACK:
            again(m, x, f, m[p + c.SEQUENCE])
        if m[f + c.FIRST_UNKNOWN] < m[f + c.ALLOWED] * m[f + c.PACKETS]:
            wait(m, x, f, time)
        else:
            m[f + c.DUE] = -1
    spend(m, x, f, time)


@inside
def timed_out(m, x, f, time):
    """Nothing was heard for a timer's time: the first packet that is not known to have come goes again, or, where only
    what would pull the next one was lost, that one goes."""
    m[f + c.TIMEOUTS] += 1
    m[f + c.DUE] = -1
    if m[f + c.FIRST_UNKNOWN] < m[f + c.NEXT_NEW]:
        again(m, x, f, m[f + c.FIRST_UNKNOWN])
    m[f + c.CREDIT] = max(m[f + c.CREDIT], 1)
    spend(m, x, f, time)
