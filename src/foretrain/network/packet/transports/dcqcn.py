"""DCQCN's rates (Zhu et al., SIGCOMM 2015, 3.3).

Receivers of marked packets send notices, which cut the rate by α/2; without them it recovers, fast at first, by a timer
and by bytes. Timers are evaluated when a packet is sent or a notice arrives, and then as often as they would have
fired: a flow that does neither has no use for its rate.
"""

from __future__ import annotations

from foretrain.network.jit import inside
from foretrain.network.packet import state as c

G, DECAY, RAISE, BYTES, FAST, STEP, LEAP, SLOWEST = range(c.LAWS, c.LAWS + 8)
"""Parameters: the weight of α's average; ps between two decays and two raises; bytes between two raises; raises that go
back to where the rate was; steps above that, and larger ones, bytes/ps; the least rate, of the highest."""
_MANY = 4096
"""Timers that fired more often than this have nothing left to change."""


@inside
def raise_rate(m, x, f):
    """Raise the rate, because the timer or the bytes have reached their next stage."""
    way = m[f + c.TRANSPORT]
    fast = x[way + FAST]
    if min(m[f + c.STAGE_TIME], m[f + c.STAGE_BYTES]) > fast:
        x[f + c.AIM] += x[way + LEAP]
    elif max(m[f + c.STAGE_TIME], m[f + c.STAGE_BYTES]) > fast:
        x[f + c.AIM] += x[way + STEP]
    x[f + c.AIM] = min(x[f + c.AIM], x[f + c.PEAK])
    x[f + c.PACE_RATE] = (x[f + c.AIM] + x[f + c.PACE_RATE]) / 2.0


@inside
def catch_up(m, x, f, time):
    """Apply what the timers have done until ``time``."""
    way = m[f + c.TRANSPORT]
    decay, step = int(x[way + DECAY]), int(x[way + RAISE])
    m[f + c.DECAYED_AT] = max(m[f + c.DECAYED_AT], time - _MANY * decay)
    while m[f + c.DECAYED_AT] + decay <= time:
        m[f + c.DECAYED_AT] += decay
        x[f + c.ALPHA] *= 1.0 - x[way + G]
    m[f + c.RAISED_AT] = max(m[f + c.RAISED_AT], time - _MANY * step)
    while m[f + c.RAISED_AT] + step <= time:
        m[f + c.RAISED_AT] += step
        m[f + c.STAGE_TIME] += 1
        raise_rate(m, x, f)


@inside
def sent(m, x, f, size, time):
    """Count ``size`` bytes that were sent."""
    catch_up(m, x, f, time)
    m[f + c.BYTES_SINCE] += size
    if m[f + c.BYTES_SINCE] >= x[m[f + c.TRANSPORT] + BYTES]:
        m[f + c.BYTES_SINCE] = 0
        m[f + c.STAGE_BYTES] += 1
        raise_rate(m, x, f)


@inside
def on_notice(m, x, f, time):
    """Cut the rate, because a notice has arrived."""
    way = m[f + c.TRANSPORT]
    catch_up(m, x, f, time)
    x[f + c.AIM] = x[f + c.PACE_RATE]
    least = x[f + c.PEAK] * x[way + SLOWEST]
    x[f + c.PACE_RATE] = max(x[f + c.PACE_RATE] * (1.0 - x[f + c.ALPHA] / 2.0), least)
    x[f + c.ALPHA] = (1.0 - x[way + G]) * x[f + c.ALPHA] + x[way + G]
    m[f + c.DECAYED_AT] = m[f + c.RAISED_AT] = time
    m[f + c.STAGE_TIME] = m[f + c.STAGE_BYTES] = m[f + c.BYTES_SINCE] = 0
