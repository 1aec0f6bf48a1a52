"""Bounded loss (DLCP, arXiv 2008.08445; MLT, NSDI 2024): a step is complete when enough of its bytes have arrived.

    sender                                receiver
    every packet once, at a rate ──────▶  counts bytes, each packet once; every packet is acknowledged, for the rate
                                 ◀──────  STOP as soon as enough have arrived; later packets are of no use
    after a silence: PROBE       ──────▶
                                 ◀──────  STOP, or MAP: what is missing
    as much of that as is needed goes again, and so on

Each step is a message of its own, and what is missing when it ends stays so: zeros, to its receiver. STOP may end a
step in the middle. Signals may be lost like everything: the next probe repeats them.

Departures: papers probe when all has gone, over a channel of its own. A probe that overtakes data finds packets in
flight missing, so ours waits for a timer, which STOP forestalls. It begins when all of the first open step has gone,
while later steps go on: their dependents do not wait for them. After so many probes in a row without an answer the flow
gives up: an error, not a hang. Packets of a step of which no full one may be lost are all important: a dropped one
would only be sent again.

Prompt ones ask as foretrain's own engine does over UDP (`foretrain.comm.bounded`): STOP goes before the acknowledgement
of what completes a step, so that an acknowledgement of its last packet alone says that something is missing, which is
asked for at once. There a receiver that has enough waits for the rest until it is asked, and loses little.
"""

from __future__ import annotations

from foretrain.network.jit import inside
from foretrain.network.packet import state as c
from foretrain.network.packet.host_tx import answer, measure, send_data, set_alarm, signal
from foretrain.network.packet.packets import first_set, give_back, is_set, put, take
from foretrain.network.packet.transports.rates import delay_next, has_room, on_ack, on_loss, pace, sent, start

HEADER = c.LAWS + 11
"""Parameter: bytes of a packet that are no data."""
PROMPT = c.LAWS + 12
"""Parameter: whether flows are prompt."""
DEVIATIONS, LONGEST = 8, 20
"""Least times that deviations of the round trip, and it in all, delay a probe by at most (ours)."""


@inside
def begin(m, x, f):
    """Initialise flow ``f``."""
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
def probe_delay(m, x, f):
    """Return the time from the last packet of a step to a probe: a round trip with its deviations.

    Not so much of them that packets that queued for long, behind other classes perhaps, delay the end; doubled for each
    probe in a row.
    """
    way = m[f + c.TRANSPORT]
    least = x[way + c.LEAST_TIMEOUT]
    trip = min(x[f + c.SMOOTHED] + min(4.0 * x[f + c.VARIATION], DEVIATIONS * least), LONGEST * least)
    return min(max(least, trip) * (1 << min(m[f + c.TRIES], 20)), x[way + c.MOST_TIMEOUT])


@inside
def wait(m, x, f, time):
    """Restart the timer of flow ``f``.

    Where the first open step has packets to send, one more than the window allows does no harm and tells whether the
    path is free: the least time. Else the timer is for a probe.
    """
    least = x[m[f + c.TRANSPORT] + c.LEAST_TIMEOUT]
    set_alarm(m, f, time + int(probe_delay(m, x, f) if gone(m, f) else least))


@inside
def row_of(m, f, step):
    """Return the row of a ``step`` of flow ``f``."""
    return m[f + c.FIRST_STEP] + c.STEP_COLUMNS * step


@inside
def next_packet(m, x, f):
    """Return the packet to send next: one of the missing, or else the next new one; -1 for none."""
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
    """Send, if steps are allowed or packets have to be repeated."""
    if not unsent(m, f):
        return
    if has_room(m, x, f):
        pace(m, x, f, time)
    elif m[f + c.DUE] < 0:
        wait(m, x, f, time)  # acknowledgements may all have been lost


@inside
def on_pace(m, x, f, time):
    """Send the next packet."""
    m[f + c.PACING] = 0
    sequence = next_packet(m, x, f) if has_room(m, x, f) else -1
    if sequence < 0:
        return
    size = send_data(m, x, f, sequence, m[f + c.SENT_PACKETS], time)
    sent(m, x, f, size, time)
    delay_next(m, x, f, size, time)
    if m[f + c.AGAIN] == 0 and sequence < (m[f + c.CLOSED] + 1) * m[f + c.PACKETS]:
        wait(m, x, f, time)  # from the last packet of the step on
    more(m, x, f, time)


@inside
def on_data(m, x, p, f, kind, time):
    """Process data packet ``p`` or a probe; return how many steps have arrived."""
    if kind == c.PROBE:
        on_probe(m, x, p, f, time)
        return complete(m, x, f)
    sequence = m[p + c.SEQUENCE]
    step = sequence // m[f + c.PACKETS]
    row = row_of(m, f, step)
    at = m[f + c.BITS] + sequence
    cut = m[p + c.WORD] & c.CUT
    if not cut and m[row + c.GOT] < enough(m, x, f) and not is_set(m, at):
        put(m, at)
        header = int(x[m[f + c.TRANSPORT] + HEADER])
        m[row + c.GOT] += (m[p + c.WORD] & c.SIZE_MASK) - header
        if m[row + c.GOT] >= enough(m, x, f):
            stop(m, x, f, step, time)
    answer(m, x, p, f, c.ACK, m[p + c.INFO], time)
    return complete(m, x, f)


@inside
def enough(m, x, f):
    """Return the bytes with which a step stops without being asked."""
    if x[m[f + c.TRANSPORT] + PROMPT] == 0.0:
        return m[f + c.NEED]
    header = int(x[m[f + c.TRANSPORT] + HEADER])
    return (m[f + c.PACKETS] - 1) * (m[f + c.FULL] - header) + m[f + c.LAST_SIZE] - header


@inside
def complete(m, x, f):
    """Return how many steps of flow ``f`` have arrived."""
    done = m[f + c.DONE]
    while done < m[f + c.STEPS] and m[row_of(m, f, done) + c.GOT] >= enough(m, x, f):
        done += 1
    return done


@inside
def stop(m, x, f, which, time):
    """Tell the sender that step ``which`` needs nothing more."""
    signal(m, f, c.STOP, m[f + c.ACK_PATH], int(x[m[f + c.TRANSPORT] + c.REPLY_SIZE]), which, 0, time)


@inside
def on_probe(m, x, p, f, time):
    """Answer probe ``p``, which asks what is missing of a step.

    The missing packets are noted where the sender will look when the answer arrives; the answer repeats the probe's
    number, so that no other can be taken for it.
    """
    which = m[p + c.SEQUENCE]
    packets, row = m[f + c.PACKETS], row_of(m, f, which)
    if m[row + c.GOT] >= m[f + c.NEED]:
        m[row + c.GOT] = max(m[row + c.GOT], enough(m, x, f))
        stop(m, x, f, which, time)
    else:
        missing = 0
        for k in range(which * packets, (which + 1) * packets):
            if is_set(m, m[f + c.BITS] + k):
                take(m, m[f + c.KNOWN] + k)
            else:
                put(m, m[f + c.KNOWN] + k)
                missing += 1
        m[row + c.MISSING] = min(missing, still_needed(m, x, f, row))
        size = min(int(x[m[f + c.TRANSPORT] + c.REPLY_SIZE]) + (packets >> 3), m[f + c.FULL])
        signal(m, f, c.MAP, m[f + c.ACK_PATH], size, which, m[p + c.INFO], time)
    give_back(m, p)


@inside
def still_needed(m, x, f, row):
    """Return how many packets the step at ``row`` needs yet, if these are sure to arrive; the last one may be short."""
    if x[m[f + c.TRANSPORT] + c.INSISTENT] == 0.0:
        return m[f + c.PACKETS]
    full = m[f + c.FULL] - int(x[m[f + c.TRANSPORT] + HEADER])
    return (m[f + c.NEED] - m[row + c.GOT]) // full + 2


@inside
def on_reply(m, x, p, f, kind, time):
    """Process an acknowledgement, STOP or MAP."""
    trip = time - m[p + c.STAMP]
    if kind == c.ACK:
        measure(m, x, f, trip)
        on_ack(m, x, f, m[p + c.INFO], m[p + c.WORD] & c.MARKED, trip)
        if x[m[f + c.TRANSPORT] + PROMPT] != 0.0 and m[p + c.INFO] == m[f + c.SENT_PACKETS] - 1 and gone(m, f):
            on_timeout(m, x, f, time)
        else:
            more(m, x, f, time)
        return
    which = m[p + c.SEQUENCE]
    if kind == c.STOP:
        m[row_of(m, f, which) + c.STOPPED] = 1
        close(m, x, f, time)
    elif m[p + c.INFO] == m[f + c.ROUND] and which == m[f + c.CLOSED]:
        m[f + c.TRIES] = 0
        if not unsent(m, f) and x[m[f + c.TRANSPORT] + PROMPT] == 0.0:
            on_loss(m, x, f)  # else later steps go, and what is heard of them sets the pace
        m[f + c.AGAIN], m[f + c.AGAIN_FROM] = m[row_of(m, f, which) + c.MISSING], which * m[f + c.PACKETS]
        more(m, x, f, time)


@inside
def close(m, x, f, time):
    """Close the steps that need nothing more; the next one may be probed."""
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
def on_timeout(m, x, f, time):
    """Probe the receiver for the first open step, once it has all gone."""
    m[f + c.DUE] = -1
    if m[f + c.CLOSED] >= m[f + c.ALLOWED]:
        return
    if not gone(m, f):
        if not m[f + c.PACING]:
            on_loss(m, x, f)  # it waits for acknowledgements that were lost
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
    signal(m, f, c.PROBE, m[m[f + c.PATHS]], size, m[f + c.CLOSED], m[f + c.ROUND], time)
    wait(m, x, f, time)
