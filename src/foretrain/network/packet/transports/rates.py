"""Sending at a rate: fixed, DCQCN, TIMELY or the window of DLCP's AIMD, with an event for each packet.

# Note [DLCP's window]
arXiv 2008.08445 calls for a minimal AIMD like DCTCP's. Once a window it falls by half of α, the moving average of the
share of packets that were marked, or lost beyond what is tolerated; it grows by one packet where there was neither, and
twofold until the first fall. Packets are numbered in the order of sending, and an acknowledgement repeats its packet's
number: earlier ones are no longer in flight, whether they arrived or not, so that losses do not clog the window. A
tolerated loss is no reason to slow down.

# Note [TIMELY]
Mittal et al., SIGCOMM 2015, algorithm 1: rates from the gradient of round trips.
"""

from __future__ import annotations

from foretrain.network.jit import inside
from foretrain.network.packet import state as c
from foretrain.network.packet.host_tx import post_event
from foretrain.network.packet.transports import dcqcn
from foretrain.network.packet.transports.transport import AIMD, DCQCN, TIMELY

AIMD_G = c.LAWS
"""Parameter: the weight of α's average."""
WEIGHT, LOW, HIGH, STEP, BETA, LEAST_TRIP, SEGMENT, TURNS, LEAPS, SLOWEST = range(c.LAWS, c.LAWS + 10)
"""Parameters: the weight of the newest difference; round trips below which the rate rises and above which it falls
whatever the gradient, ps; a step, bytes/ps; β; the round trip of an empty network, ps; bytes of a segment, each of
which is one measurement; after how many rises in a row steps are larger, and how much; the least rate, of the
highest."""


@inside
def law(m, x, f):
    """Return the rate law of flow ``f``."""
    return int(x[m[f + c.TRANSPORT] + c.LAW])


@inside
def start(m, x, f):
    """Start at the rate of the slowest link."""
    x[f + c.PACE_RATE] = x[f + c.AIM] = x[f + c.PEAK]
    x[f + c.ALPHA] = 1.0
    if law(m, x, f) == AIMD:
        open_window(m, x, f)


@inside
def has_room(m, x, f):
    """Return whether the bytes in flight let flow ``f`` send."""
    return law(m, x, f) != AIMD or window_has_room(m, x, f)


@inside
def sent(m, x, f, size, time):
    """Count ``size`` bytes that were sent."""
    if law(m, x, f) == DCQCN:
        dcqcn.sent(m, x, f, size, time)


@inside
def on_ack(m, x, f, number, mark, trip):
    """Process the acknowledgement of packet ``number``: ``mark`` where it met congestion, ``trip`` ps round trip."""
    which = law(m, x, f)
    if which == TIMELY:
        rate_on_trip(m, x, f, trip)
    elif which == AIMD:
        window_on_ack(m, x, f, number, mark)


@inside
def on_notice(m, x, f, time):
    """Process a notice of congestion."""
    if law(m, x, f) == DCQCN:
        dcqcn.on_notice(m, x, f, time)


@inside
def on_loss(m, x, f):
    """Slow down: more was lost than is tolerated, or nothing was heard."""
    which = law(m, x, f)
    if which == AIMD:
        halve_window(m, x, f)
    elif which == TIMELY:
        slow_down(m, x, f, 0.5)


@inside
def pace(m, x, f, time):
    """Post the event for the next packet of flow ``f``, as soon as its rate allows."""
    if not m[f + c.PACING]:
        m[f + c.PACING] = 1
        post_event(m, f, c.PACE, 0, max(time, m[f + c.NEXT_SEND]))


@inside
def delay_next(m, x, f, size, time):
    """Delay the next packet by what ``size`` bytes take at the rate."""
    m[f + c.NEXT_SEND] = time + int(size / x[f + c.PACE_RATE])


# ── DLCP's window ──


@inside
def open_window(m, x, f):
    """Initialise flow ``f``."""
    way = m[f + c.TRANSPORT]
    x[f + c.WINDOW], x[f + c.THRESHOLD] = x[way + c.FIRST_WINDOW], x[way + c.MOST]


@inside
def window_has_room(m, x, f):
    """Return whether flow ``f`` may have one more packet in flight."""
    return m[f + c.SENT_PACKETS] - m[f + c.HEARD_OF] < int(x[f + c.WINDOW])


@inside
def window_on_ack(m, x, f, number, mark):
    """Process the acknowledgement of packet ``number``, which met congestion where ``mark``."""
    m[f + c.ACKED] += 1
    if mark:
        m[f + c.ACKED_MARKED] += 1
    m[f + c.HEARD_OF] = max(m[f + c.HEARD_OF], number + 1)
    if number < m[f + c.WINDOW_END]:
        return
    way = m[f + c.TRANSPORT]
    went = number + 1 - m[f + c.STAGE_BYTES]
    over = max(went - m[f + c.ACKED] - x[way + c.TOLERATED] * went, 0.0)
    share = (m[f + c.ACKED_MARKED] + over) / (m[f + c.ACKED] + over)
    x[f + c.ALPHA] += x[way + AIMD_G] * (share - x[f + c.ALPHA])
    window = x[f + c.WINDOW]
    if share > 0.0:
        window = max(window * (1.0 - x[f + c.ALPHA] / 2.0), 1.0)
        x[f + c.THRESHOLD] = window
    elif window < x[f + c.THRESHOLD]:
        window *= 2.0
    else:
        window += 1.0
    x[f + c.WINDOW] = min(window, x[way + c.MOST])
    m[f + c.ACKED] = m[f + c.ACKED_MARKED] = 0
    m[f + c.STAGE_BYTES], m[f + c.WINDOW_END] = number + 1, m[f + c.SENT_PACKETS]


@inside
def halve_window(m, x, f):
    """Halve the window and count nothing as in flight, after a long silence or many losses."""
    m[f + c.HEARD_OF] = m[f + c.STAGE_BYTES] = m[f + c.WINDOW_END] = m[f + c.SENT_PACKETS]
    m[f + c.ACKED] = m[f + c.ACKED_MARKED] = 0
    x[f + c.WINDOW] = max(x[f + c.WINDOW] / 2.0, 1.0)
    x[f + c.THRESHOLD] = x[f + c.WINDOW]


# ── TIMELY ──


@inside
def rate_on_trip(m, x, f, trip):
    """Process a round trip of ``trip`` ps; once a segment it changes the rate."""
    way = m[f + c.TRANSPORT]
    m[f + c.BYTES_SINCE] += m[f + c.FULL]
    if m[f + c.BYTES_SINCE] < x[way + SEGMENT]:
        return
    m[f + c.BYTES_SINCE] = 0
    if x[f + c.LAST_TRIP] == 0.0:
        x[f + c.LAST_TRIP] = trip
    weight = x[way + WEIGHT]
    x[f + c.GRADIENT] += weight * (trip - x[f + c.LAST_TRIP] - x[f + c.GRADIENT])
    x[f + c.LAST_TRIP] = trip
    gradient = x[f + c.GRADIENT] / x[way + LEAST_TRIP]
    step, rate = x[way + STEP], x[f + c.PACE_RATE]
    if trip < x[way + LOW]:
        rate += step
    elif trip > x[way + HIGH]:
        rate *= 1.0 - x[way + BETA] * (1.0 - x[way + HIGH] / trip)
        m[f + c.STAGE_TIME] = 0
    elif gradient <= 0.0:
        m[f + c.STAGE_TIME] += 1
        rate += step * (x[way + LEAPS] if m[f + c.STAGE_TIME] >= x[way + TURNS] else 1.0)
    else:
        rate *= 1.0 - x[way + BETA] * min(gradient, 1.0)
        m[f + c.STAGE_TIME] = 0
    x[f + c.PACE_RATE] = min(rate, x[f + c.PEAK])
    slow_down(m, x, f, 1.0)


@inside
def slow_down(m, x, f, factor):
    """Multiply the rate by ``factor``, down to the least one."""
    least = x[f + c.PEAK] * x[m[f + c.TRANSPORT] + SLOWEST]
    x[f + c.PACE_RATE] = max(x[f + c.PACE_RATE] * factor, least)
