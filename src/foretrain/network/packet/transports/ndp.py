"""NDP (Handley et al., SIGCOMM 2017): a first window at once, then each packet when its receiver pulls it.

Switches trim what does not fit to its header, so a receiver knows of every packet that was sent, asks for it again, and
pulls at the rate at which its link can take packets, from its flows in turn. Headers and replies are of class 0, data
of class 1 at least, so set ``strict=1`` or more at switches.

Departures: a switch always trims what arrives, not now and then what came last; headers that find no room are dropped
and found by a timer, not returned to their sender. A step begins with a first window where the connection was idle.
"""

from __future__ import annotations

from foretrain.network.jit import inside
from foretrain.network.packet import state as c
from foretrain.network.packet.host_tx import answer, post_event, send_data, set_alarm, signal
from foretrain.network.packet.packets import first_set, is_set, put, record, take


@inside
def begin(m, x, f):
    """Initialise flow ``f``."""
    m[f + c.CREDIT] = 0


@inside
def wait(m, x, f, time):
    """Restart the timer of flow ``f``."""
    set_alarm(m, f, time + int(x[m[f + c.TRANSPORT] + c.LEAST_TIMEOUT]))


@inside
def more(m, x, f, time):
    """Send, because steps are allowed: a first window of them at once, where nothing is in flight."""
    if m[f + c.FIRST_UNKNOWN] == m[f + c.NEXT_NEW]:
        m[f + c.CREDIT] = int(x[m[f + c.TRANSPORT] + c.FIRST_WINDOW])
    send_credit(m, x, f, time)


@inside
def send_credit(m, x, f, time):
    """Send as many packets as there is credit: first trimmed ones again, then new ones."""
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
def on_data(m, x, p, f, time):
    """Acknowledge packet ``p``, or ask for it if only its header arrived; return how many steps have arrived."""
    if m[p + c.WORD] & c.CUT:
        answer(m, x, p, f, c.NACK, m[f + c.EXPECTED], time)
    else:
        record(m, f, p)
        answer(m, x, p, f, c.ACK, m[f + c.EXPECTED], time)
    if m[f + c.EXPECTED] < m[f + c.PACKETS] * m[f + c.STEPS]:
        here = m[f + c.TARGET]
        if m[f + c.PULLS] == 0:
            enqueue_pull(m, x, f, here)
        m[f + c.PULLS] += 1
        if not m[here + c.PULLING]:
            m[here + c.PULLING] = 1
            post_event(m, f, c.DRAW, 0, max(time, m[here + c.PULL_FREE]))
    return m[f + c.EXPECTED] // m[f + c.PACKETS]


@inside
def enqueue_pull(m, x, f, here):
    """Append flow ``f`` to the flows that its host pulls from in turn."""
    m[f + c.PULL_NEXT] = -1
    if m[here + c.PULL_FIRST] < 0:
        m[here + c.PULL_FIRST] = f
    else:
        m[m[here + c.PULL_LAST] + c.PULL_NEXT] = f
    m[here + c.PULL_LAST] = f


@inside
def on_pull(m, x, here, time):
    """Pull one packet to host ``here``, of the flow whose turn it is."""
    f = m[here + c.PULL_FIRST]
    m[here + c.PULL_FIRST] = m[f + c.PULL_NEXT]
    m[f + c.PULLS] -= 1
    if m[f + c.PULLS] > 0:
        enqueue_pull(m, x, f, here)
    signal(m, f, c.PULL, m[f + c.ACK_PATH], int(x[m[f + c.TRANSPORT] + c.REPLY_SIZE]), 0, 0, time)
    m[here + c.PULL_FREE] = time + (m[f + c.FULL] * m[f + c.LAST_RATE] >> 16)
    if m[here + c.PULL_FIRST] >= 0:
        post_event(m, m[here + c.PULL_FIRST], c.DRAW, 0, m[here + c.PULL_FREE])
    else:
        m[here + c.PULLING] = 0


@inside
def retransmit(m, x, f, sequence):
    """Note that packet ``sequence`` of flow ``f`` has to be sent again."""
    at = m[f + c.KNOWN] + sequence
    if sequence >= m[f + c.FIRST_UNKNOWN] and not is_set(m, at):
        put(m, at)
        m[f + c.AGAIN_FROM] = min(m[f + c.AGAIN_FROM], sequence) if m[f + c.AGAIN] > 0 else sequence
        m[f + c.AGAIN] += 1


@inside
def on_reply(m, x, p, f, kind, time):
    """Process an acknowledgement, a request for a packet, or a pull."""
    if kind == c.PULL:
        m[f + c.CREDIT] += 1
    else:
        if m[p + c.INFO] > m[f + c.FIRST_UNKNOWN]:
            m[f + c.FIRST_UNKNOWN] = m[p + c.INFO]
        if kind == c.NACK:
            retransmit(m, x, f, m[p + c.SEQUENCE])
        if m[f + c.FIRST_UNKNOWN] < m[f + c.ALLOWED] * m[f + c.PACKETS]:
            wait(m, x, f, time)
        else:
            m[f + c.DUE] = -1
    send_credit(m, x, f, time)


@inside
def on_timeout(m, x, f, time):
    """Send the first packet that may be lost again, or a new one where only the pull for it was lost."""
    m[f + c.TIMEOUTS] += 1
    m[f + c.DUE] = -1
    if m[f + c.FIRST_UNKNOWN] < m[f + c.NEXT_NEW]:
        retransmit(m, x, f, m[f + c.FIRST_UNKNOWN])
    m[f + c.CREDIT] = max(m[f + c.CREDIT], 1)
    send_credit(m, x, f, time)
