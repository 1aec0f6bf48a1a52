"""Bounded loss (DLCP, arXiv 2008.08445; MLT, NSDI 2024): a step has come when enough of its bytes have.

    sender                                receiver
    every packet once, at a rate ──────▶  counts bytes, each packet once; every packet is acknowledged, for the rate
                                 ◀──────  STOP as soon as enough have come, and whatever comes later is of no use
    nothing for a while: PROBE   ──────▶
                                 ◀──────  STOP, or MAP: what is missing
    of that goes again what is needed, and so on

Each step is a message of its own, and what is missing when it ends stays so: zeros, to its receiver. STOP may end a
step in the middle. Signals may be lost like everything: the next probe repeats them.

Departures: papers probe when all has gone, over a channel of its own. A probe that overtakes data finds missing what is
under way, so ours waits for a timer, which STOP forestalls. It begins when all of the first open step has gone, while
later steps go on: whoever waits for that step does not wait for them. After so many probes in a row without an answer
the flow gives up: an error, not a hang. Packets of a step of which no full one may be lost are all important: to drop
one would only have it sent again.
"""

from __future__ import annotations

from foretrain.network.jit import inside
from foretrain.network.packet import state as c
from foretrain.network.packet.host_tx import answer, measure, send_data, set_alarm, signal
from foretrain.network.packet.packets import first_set, give_back, is_set, put, take
from foretrain.network.packet.transports.rates import has_room, heard, missed, pace, sent, spent, start

HEADER = c.LAWS + 11
"""Parameter: bytes of a packet that are no data."""
PATIENCE, LONGEST = 8, 20
"""Least times that deviations of the round trip, and it in all, delay a probe by at most (ours)."""


@inside
def begin(m, x, f):
    """Flow ``f`` will send for the first time."""
    start(m, x, f)


@inside
def unsent(m, f):
    """Return whether flow ``f`` has packets to send."""
    return m[f + c.AGAIN] > 0 or m[f + c.NEXT_NEW] < m[f + c.ALLOWED] * m[f + c.PACKETS]


@inside
def gone(m, f):
    """Return whether flow ``f`` has sent all that it may of its first open step, later steps aside."""
    return m[f + c.AGAIN] == 0 and m[f + c.NEXT_NEW] >= min(m[f + c.CLOSED] + 1, m[f + c.ALLOWED]) * m[f + c.PACKETS]


@inside
def wait(m, x, f, time):
    """The timer begins again. Where the first open step has packets to send, one more than the window allows does no
    harm and tells that the way is free: the least time. Else it is for a probe: a round trip with its deviations, but
    not so much of them that packets that queued for long, behind other classes perhaps, delay the end; doubled for each
    probe in a row."""
    way = m[f + c.TRANSPORT]
    least = x[way + c.LEAST_TIMEOUT]
    if gone(m, f):
        trip = min(x[f + c.SMOOTHED] + min(4.0 * x[f + c.VARIATION], PATIENCE * least), LONGEST * least)
        least = min(max(least, trip) * (1 << min(m[f + c.TRIES], 20)), x[way + c.MOST_TIMEOUT])
    set_alarm(m, f, time + int(least))


@inside
def row_of(m, f, step):
    """Return the row of a ``step`` of flow ``f``."""
    return m[f + c.FIRST_STEP] + c.STEP_COLUMNS * step


@inside
def next_packet(m, x, f):
    """The packet that goes next: of those that are missing, or else the next that never went; -1 for none."""
    first, packets = m[f + c.KNOWN], m[f + c.PACKETS]
    if m[f + c.AGAIN] > 0:
        end = (m[f + c.CLOSED] + 1) * packets
        sequence = first_set(m, first + m[f + c.AGAIN_FROM], first + end) - first
        m[f + c.AGAIN_FROM] = sequence + 1
        m[f + c.AGAIN] -= 1
        take(m, first + sequence)
        return sequence
    end = m[f + c.ALLOWED] * packets
    while m[f + c.NEXT_NEW] < end:
        step = m[f + c.NEXT_NEW] // packets
        if not m[row_of(m, f, step) + c.STOPPED]:
            m[f + c.NEXT_NEW] += 1
            return m[f + c.NEXT_NEW] - 1
        m[f + c.NEXT_NEW] = (step + 1) * packets
    return -1


@inside
def more(m, x, f, time):
    """Steps may go, or packets go again."""
    if not unsent(m, f):
        return
    if has_room(m, x, f):
        pace(m, x, f, time)
    elif m[f + c.DUE] < 0:
        wait(m, x, f, time)  # acknowledgements may all have been lost


@inside
def paced(m, x, f, time):
    """The next packet goes."""
    m[f + c.PACING] = 0
    sequence = next_packet(m, x, f) if has_room(m, x, f) else -1
    if sequence < 0:
        return
    size = send_data(m, x, f, sequence, m[f + c.SENT_PACKETS], time)
    sent(m, x, f, size, time)
    spent(m, x, f, size, time)
    if m[f + c.AGAIN] == 0 and sequence < (m[f + c.CLOSED] + 1) * m[f + c.PACKETS]:
        wait(m, x, f, time)  # from the last packet of the step on
    more(m, x, f, time)


@inside
def came(m, x, p, f, kind, time):
    """Data packet ``p`` or a probe has come; how many steps have."""
    if kind == c.PROBE:
        probed(m, x, p, f, time)
        return m[f + c.DONE]
    sequence = m[p + c.SEQUENCE]
    step = sequence // m[f + c.PACKETS]
    row = row_of(m, f, step)
    at = m[f + c.BITS] + sequence
    cut = m[p + c.WORD] & c.CUT
    if not cut and m[row + c.GOT] < m[f + c.NEED] and not is_set(m, at):
        put(m, at)
        header = int(x[m[f + c.TRANSPORT] + HEADER])
        m[row + c.GOT] += (m[p + c.WORD] & c.SIZE_MASK) - header
        if m[row + c.GOT] >= m[f + c.NEED]:
            stop(m, x, f, step, time)
    answer(m, x, p, f, c.ACK, m[p + c.INFO], time)
    done = m[f + c.DONE]
    while done < m[f + c.STEPS] and m[row_of(m, f, done) + c.GOT] >= m[f + c.NEED]:
        done += 1
    return done


@inside
def stop(m, x, f, which, time):
    """Step ``which`` needs nothing more."""
    signal(m, f, c.STOP, m[f + c.BACK], int(x[m[f + c.TRANSPORT] + c.REPLY_SIZE]), which, 0, time)


@inside
def probed(m, x, p, f, time):
    """Probe ``p`` asks what is missing of a step: that is noted where its sender will look when the answer comes, of
    which no other can be under way since it repeats the probe's number."""
    which = m[p + c.SEQUENCE]
    packets, row = m[f + c.PACKETS], row_of(m, f, which)
    if m[row + c.GOT] >= m[f + c.NEED]:
        stop(m, x, f, which, time)
    else:
        missing = 0
        for k in range(which * packets, (which + 1) * packets):
            if is_set(m, m[f + c.BITS] + k):
                take(m, m[f + c.KNOWN] + k)
            else:
                put(m, m[f + c.KNOWN] + k)
                missing += 1
        m[row + c.MISSING] = min(missing, wanted(m, x, f, row))
        size = min(int(x[m[f + c.TRANSPORT] + c.REPLY_SIZE]) + (packets >> 3), m[f + c.FULL])
        signal(m, f, c.MAP, m[f + c.BACK], size, which, m[p + c.INFO], time)
    give_back(m, p)


@inside
def wanted(m, x, f, row):
    """How many packets the step at ``row`` needs yet, where these are sure to come; the last one may be a short one."""
    if x[m[f + c.TRANSPORT] + c.INSISTENT] == 0.0:
        return m[f + c.PACKETS]
    full = m[f + c.FULL] - int(x[m[f + c.TRANSPORT] + HEADER])
    return (m[f + c.NEED] - m[row + c.GOT]) // full + 2


@inside
def answered(m, x, p, f, kind, time):
    """An acknowledgement, STOP or MAP has come."""
    trip = time - m[p + c.STAMP]
    if kind == c.ACK:
        measure(m, x, f, trip)
        heard(m, x, f, m[p + c.INFO], m[p + c.WORD] & c.MARKED, trip)
        more(m, x, f, time)
        return
    which = m[p + c.SEQUENCE]
    if kind == c.STOP:
        m[row_of(m, f, which) + c.STOPPED] = 1
        close(m, x, f, time)
    elif m[p + c.INFO] == m[f + c.ROUND] and which == m[f + c.CLOSED]:
        m[f + c.TRIES] = 0
        if not unsent(m, f):
            missed(m, x, f)  # else later steps go, and what is heard of them sets the pace
        m[f + c.AGAIN], m[f + c.AGAIN_FROM] = m[row_of(m, f, which) + c.MISSING], which * m[f + c.PACKETS]
        more(m, x, f, time)


@inside
def close(m, x, f, time):
    """Steps that are known to need nothing more are over; the next one may be probed."""
    before = m[f + c.CLOSED]
    while m[f + c.CLOSED] < m[f + c.STEPS] and m[row_of(m, f, m[f + c.CLOSED]) + c.STOPPED]:
        m[f + c.CLOSED] += 1
    if m[f + c.CLOSED] == before:
        return
    m[f + c.AGAIN] = m[f + c.TRIES] = 0
    m[f + c.ROUND] += 1  # what is said of another step comes too late
    m[f + c.NEXT_NEW] = max(m[f + c.NEXT_NEW], m[f + c.CLOSED] * m[f + c.PACKETS])
    if m[f + c.CLOSED] < m[f + c.ALLOWED]:
        wait(m, x, f, time)
    else:
        m[f + c.DUE] = -1


@inside
def timed_out(m, x, f, time):
    """Nothing said that the first open step has come: its receiver is asked, once it has all gone."""
    m[f + c.DUE] = -1
    if m[f + c.CLOSED] >= m[f + c.ALLOWED]:
        return
    if not gone(m, f):
        if not m[f + c.PACING]:
            missed(m, x, f)  # it waits for acknowledgements that were lost
            more(m, x, f, time)
        wait(m, x, f, time)
        return
    way = m[f + c.TRANSPORT]
    if m[f + c.TRIES] >= x[way + c.MOST_TRIES]:
        return  # it gives up; who waits for it will be told
    m[f + c.TIMEOUTS] += 1
    m[f + c.TRIES] += 1
    m[f + c.ROUND] += 1
    size = int(x[way + c.REPLY_SIZE])
    signal(m, f, c.PROBE, m[m[f + c.FORTH]], size, m[f + c.CLOSED], m[f + c.ROUND], time)
    wait(m, x, f, time)
