"""Sending at a rate: fixed, DCQCN, TIMELY or the window of DLCP's AIMD, with an event for each packet."""

from __future__ import annotations

from foretrain.network.jit import inside
from foretrain.network.packet import state as c
from foretrain.network.packet.host_tx import post_event
from foretrain.network.packet.transports import aimd, dcqcn, timely
from foretrain.network.packet.transports.transport import AIMD, DCQCN, TIMELY


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
        aimd.begin(m, x, f)


@inside
def has_room(m, x, f):
    """Return whether the bytes in flight let flow ``f`` send."""
    return law(m, x, f) != AIMD or aimd.has_room(m, x, f)


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
        timely.on_ack(m, x, f, trip)
    elif which == AIMD:
        aimd.on_ack(m, x, f, number, mark)


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
        aimd.halve(m, x, f)
    elif which == TIMELY:
        timely.slow_down(m, x, f, 0.5)


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
