"""TIMELY's rates (Mittal et al., SIGCOMM 2015, algorithm 1): from the gradient of round trips."""

from __future__ import annotations

from foretrain.network.jit import inside
from foretrain.network.packet import state as c

WEIGHT, LOW, HIGH, STEP, BETA, LEAST_TRIP, SEGMENT, TURNS, LEAPS, SLOWEST = range(c.LAWS, c.LAWS + 10)
"""Parameters: the weight of the newest difference; round trips below which the rate rises and above which it falls
whatever the gradient, ps; a step, bytes/ps; β; the round trip of an empty network, ps; bytes of a segment, each of
which is one measurement; after how many rises in a row steps are larger, and how much; the least rate, of the
highest."""


@inside
def on_ack(m, x, f, trip):
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
