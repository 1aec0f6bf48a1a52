"""DLCP's window (arXiv 2008.08445 calls for a minimal AIMD like DCTCP's).

Once a window it falls by half of α, the moving average of the share of packets that were marked, or lost beyond what is
tolerated; it grows by one packet where there was neither, and twofold until the first fall. Packets are numbered in the
order of sending, and an acknowledgement repeats its packet's number: earlier ones are no longer in flight, whether they
arrived or not, so that losses do not clog the window. A tolerated loss is no reason to slow down.
"""

from __future__ import annotations

from foretrain.network.jit import inside
from foretrain.network.packet import state as c

G = c.LAWS
"""Parameter: the weight of α's average."""


@inside
def begin(m, x, f):
    """Initialise flow ``f``."""
    way = m[f + c.TRANSPORT]
    x[f + c.WINDOW], x[f + c.THRESHOLD] = x[way + c.FIRST_WINDOW], x[way + c.MOST]


@inside
def has_room(m, x, f):
    """Return whether flow ``f`` may have one more packet in flight."""
    return m[f + c.SENT_PACKETS] - m[f + c.HEARD_OF] < int(x[f + c.WINDOW])


@inside
def on_ack(m, x, f, number, mark):
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
    x[f + c.ALPHA] += x[way + G] * (share - x[f + c.ALPHA])
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
def halve(m, x, f):
    """Halve the window and count nothing as in flight, after a long silence or many losses."""
    m[f + c.HEARD_OF] = m[f + c.STAGE_BYTES] = m[f + c.WINDOW_END] = m[f + c.SENT_PACKETS]
    m[f + c.ACKED] = m[f + c.ACKED_MARKED] = 0
    x[f + c.WINDOW] = max(x[f + c.WINDOW] / 2.0, 1.0)
    x[f + c.THRESHOLD] = x[f + c.WINDOW]
