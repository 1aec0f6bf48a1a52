"""Packets at a rate: an event for each, when the one before it would have gone at that rate."""

from __future__ import annotations

from foretrain.network.packet import state as c
from foretrain.network.packet.host_tx import remind
from foretrain.network.packet.jit import inside


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
