"""Sending at a rate: none, DCQCN, TIMELY or the window of DLCP's AIMD, and an event for each packet.

Packets at a rate: an event for each, when the one before it would have gone at that rate.
"""

from __future__ import annotations

from foretrain.network.jit import inside
from foretrain.network.packet import state as c
from foretrain.network.packet.host_tx import remind
from foretrain.network.packet.transports import aimd, dcqcn, timely
from foretrain.network.packet.transports.transport import AIMD, DCQCN, TIMELY


@inside
def law(m, x, f):
    """Return the rate law of flow ``f``."""
    return int(x[m[f + c.TRANSPORT] + c.LAW])


@inside
def start(m, x, f):
    """At the rate of the slowest link."""
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
    """``size`` bytes have gone."""
    if law(m, x, f) == DCQCN:
        dcqcn.sent(m, x, f, size, time)


@inside
def heard(m, x, f, number, mark, trip):
    """Packet ``number`` of those that went was acknowledged; it met congestion where ``mark``; there and back it took
    ``trip`` ps."""
    which = law(m, x, f)
    if which == TIMELY:
        timely.heard(m, x, f, trip)
    elif which == AIMD:
        aimd.heard(m, x, f, number, mark)


@inside
def warned(m, x, f, time):
    """The receiver says that there is congestion."""
    if law(m, x, f) == DCQCN:
        dcqcn.warned(m, x, f, time)


@inside
def missed(m, x, f):
    """More was lost than may be, or nothing was heard."""
    which = law(m, x, f)
    if which == AIMD:
        aimd.forget(m, x, f)
    elif which == TIMELY:
        timely.slow_down(m, x, f, 0.5)


@inside
def pace(m, x, f, time):
    """The next packet of flow ``f`` goes as soon as its rate allows."""
    if not m[f + c.PACING]:
        m[f + c.PACING] = 1
        remind(m, f, c.PACE, 0, max(time, m[f + c.NEXT_SEND]))


@inside
def spent(m, x, f, size, time):
    """A packet of ``size`` bytes has gone."""
    m[f + c.NEXT_SEND] = time + int(size / x[f + c.PACE_RATE])
