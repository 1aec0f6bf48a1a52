"""How long a sender waits (RFC 6298)."""

from __future__ import annotations

from foretrain.network.packet import state as c
from foretrain.network.packet.jit import inside


@inside
def timeout(m, x, f):
    """The retransmission timeout, ps (RFC 6298, 2), doubled for every one in a row."""
    way = m[f + c.TRANSPORT]
    least, most = x[way + c.LEAST_TIMEOUT], x[way + c.MOST_TIMEOUT]
    found = x[f + c.SMOOTHED] + 4.0 * x[f + c.VARIATION]
    return int(min(max(found, least) * (1 << min(m[f + c.BACKOFF], 20)), most))


@inside
def measure(m, x, f, round_trip):
    """RFC 6298, 2.2 and 2.3."""
    if x[f + c.SMOOTHED] == 0.0:
        x[f + c.SMOOTHED] = round_trip
        x[f + c.VARIATION] = round_trip / 2
        return
    off = abs(x[f + c.SMOOTHED] - round_trip)
    x[f + c.VARIATION] = 0.75 * x[f + c.VARIATION] + 0.25 * off
    x[f + c.SMOOTHED] = 0.875 * x[f + c.SMOOTHED] + 0.125 * round_trip
