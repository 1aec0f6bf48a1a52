"""The packet kernel event by event: slower than windows, with the same results.

It is the reference for `foretrain.network.packet.window_kernel`, and runs networks whose links are too short for
windows. Ports and hosts are the same functions; only the order of events is found another way.
"""

from __future__ import annotations

from foretrain.network.jit import entry, inside
from foretrain.network.packet import state as c
from foretrain.network.packet.host_rx import handle
from foretrain.network.packet.host_tx import release
from foretrain.network.packet.packets import give_back
from foretrain.network.packet.queues import admit, apply_pause, at_once, is_pause, pick, ready, sample, send

DEPARTURE = -(1 << 60)
"""The tie of a departure from link 0: before all that arrives, and in the order of links."""


@inside
def earlier(event, one, other):
    """Return whether row ``one`` comes before row ``other``."""
    if event[one, 0] != event[other, 0]:
        return event[one, 0] < event[other, 0]
    return event[one, 1] < event[other, 1]


@inside
def move(event, source, target):
    """Copy a row."""
    event[target, 0], event[target, 1], event[target, 2] = event[source, 0], event[source, 1], event[source, 2]


@inside
def push(m, event, time, tie, what):
    """Queue the arrival of packet ``what`` at ``time``, or the departure that frees port ``what``."""
    at = m[c.QUEUED_EVENTS]
    m[c.QUEUED_EVENTS] = at + 1
    while at > 0:
        above = (at - 1) >> 1
        if event[above, 0] < time or (event[above, 0] == time and event[above, 1] <= tie):
            break
        move(event, above, at)
        at = above
    event[at, 0], event[at, 1], event[at, 2] = time, tie, what


@inside
def pop(m, event):
    """Remove the first event, which is row 0."""
    n = m[c.QUEUED_EVENTS] - 1
    m[c.QUEUED_EVENTS] = n
    at = 0
    while True:
        child = 2 * at + 1
        if child >= n:
            break
        if child + 1 < n and earlier(event, child + 1, child):
            child += 1
        if not earlier(event, child, n):
            break
        move(event, child, at)
        at = child
    move(event, n, at)


@inside
def arrives(m, event, p):
    """Queue the arrival of packet ``p``."""
    push(m, event, m[p + c.TIME], m[p + c.TIE], p)


@inside
def depart(m, event, p, link, start):
    """Send packet ``p`` over ``link`` from ``start`` on."""
    if send(m, p, link, start):
        arrives(m, event, p)
    push(m, event, m[link + c.BUSY], DEPARTURE + m[link + c.NUMBER], link)


@inside
def send_pause_frame(m, event):
    """Send the pause frame that a port has made, if there is one."""
    if m[c.ASKING] >= 0:
        arrives(m, event, m[c.ASKING])
        m[c.ASKING] = -1


@inside
def depart_first(m, event, link, time):
    """Send the next packet in the queues of ``link``."""
    p = pick(m, link, time)
    send_pause_frame(m, event)
    depart(m, event, p, link, time)


@inside
def take_over(m, event):
    """Put the packets and events of a host into the heap."""
    p = m[c.OUT]
    while p >= 0:
        following = m[p + c.NEXT]
        arrives(m, event, p)
        p = following
    m[c.OUT] = -1


@inside
def happen(m, x, event, p, time):
    """Let packet ``p`` arrive at a port or a host."""
    kind = m[p + c.WORD] >> c.KIND_SHIFT & c.KIND_MASK
    if is_pause(m, p):
        link = m[p + c.SEQUENCE]
        apply_pause(m, p, link)
        give_back(m, p)
        if ready(m, link) and m[link + c.BUSY] <= time:
            depart_first(m, event, link, time)
        return
    link = m[m[p + c.WAY] & 0xFFFFFFFF]
    if link < 0 or kind > c.LAST_CROSSING:
        handle(m, x, p)
        take_over(m, event)
    elif m[link + c.BUSY] <= time and not ready(m, link) and at_once(m, p, link):
        depart(m, event, p, link, time)
    else:
        admit(m, p, link)
        send_pause_frame(m, event)
        if ready(m, link) and m[link + c.BUSY] <= time:
            depart_first(m, event, link, time)


@entry
def load(m, event):
    """Put the first events of new flows into the heap."""
    release(m)
    take_over(m, event)


@entry
def run(m, x, event, trace, events):
    """Run at most ``events`` events; return the reason to stop, one of those in `state`."""
    for _ in range(events):
        if m[c.QUEUED_EVENTS] == 0:
            return c.STUCK if m[c.UNFINISHED] > 0 else c.DONE_ALL
        if m[c.COMPLETED] > 0:
            return c.BREATH
        if event[0, 0] >= m[c.UNTIL]:
            return c.THERE
        if m[c.FREES] < m[c.MARGIN]:
            return c.GROW
        time, tie, what = event[0, 0], event[0, 1], event[0, 2]
        if m[c.TRACE_EVERY] > 0 and not sample(m, trace, time >> m[c.SHIFT]):
            return c.BREATH
        pop(m, event)
        if tie >= 0:
            happen(m, x, event, what, time)
        elif ready(m, what):
            depart_first(m, event, what, time)
    return c.BREATH
