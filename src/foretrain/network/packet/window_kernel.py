"""The packet kernel: window after window, every port by itself, without a queue of events.

A window is no longer than the shortest link takes, so nothing that leaves a port or a host in one arrives anywhere
before the next: within a window ports cannot influence each other. Packets on the wire lie in a wheel of lists, one for
each window ahead. When a window comes its packets go to the ports and hosts that they arrive at; hosts act first, since
what they send arrives at their ports in the same window; then every port merges its arrivals, in order, with its own
departures. `foretrain.network.packet.event_kernel` finds the same to the ps.

Switches whose ports influence each other within a window, since they share a buffer or pause who sends to them, are run
as one: all arrivals and departures are merged, and the ports are searched for who departs first.
"""

# Note [Order]
# At one instant a port first ends what it sends, and takes the next packet from its queues; then arrivals come, by the
# link that they arrive over; then a host's own events; then what the host sends. No two packets come over one link at
# one instant, and a host's packets are numbered, so this is an order of everything that meets at a port or a host. What
# does not meet there can have any order.

from __future__ import annotations

from foretrain.network.jit import entry, inside
from foretrain.network.packet import state as c
from foretrain.network.packet.host_rx import handle, host_of
from foretrain.network.packet.host_tx import release
from foretrain.network.packet.packets import before, fly, give_back, in_order, pop_far
from foretrain.network.packet.queues import admit, apply_pause, at_once, is_pause, pick, ready, sample, send, wake


@inside
def first_to_depart(m, first, last, end):
    """Return the port listed from ``first`` to ``last`` that can send first before ``end``, or -1; the lower
    link of two at one instant."""
    best, time = -1, end
    for k in range(first, last):
        link = m[k]
        if m[link + c.BUSY] < time and ready(m, link):
            best, time = link, m[link + c.BUSY]
    return best


@inside
def send_pause_frame(m, far):
    """Send the pause frame that a port has made, if there is one."""
    if m[c.ASKING] >= 0:
        fly(m, far, m[c.ASKING])
        m[c.ASKING] = -1


@inside
def run_switch(m, far, buffer, at, end):
    """Run node ``at`` until ``end``; return whether one of its ports has more that it may send."""
    n = 0
    if m[at + c.COMING] >= 0:
        n = in_order(m, m[at + c.COMING], buffer)
        m[at + c.COMING] = -1
    first, last = m[at + c.FIRST_PORT], m[at + c.LAST_PORT]
    i = 0
    while True:
        link = first_to_depart(m, first, last, end)
        if link >= 0 and (i == n or m[link + c.BUSY] <= m[buffer[i] + c.TIME]):
            busy = m[link + c.BUSY]
            p = pick(m, link, busy)
            send_pause_frame(m, far)
            if send(m, p, link, busy):
                fly(m, far, p)
        elif i < n:
            p = buffer[i]
            i += 1
            if is_pause(m, p):
                apply_pause(m, p, m[p + c.SEQUENCE])
                give_back(m, p)
                continue
            link = m[m[p + c.WAY] & 0xFFFFFFFF]
            if m[link + c.BUSY] <= m[p + c.TIME] and at_once(m, p, link):
                if send(m, p, link, m[p + c.TIME]):
                    fly(m, far, p)
            else:
                time = m[p + c.TIME]
                admit(m, p, link)
                send_pause_frame(m, far)
                wake(m, link, time)
        else:
            break
    left = 0
    for k in range(first, last):
        left |= ready(m, m[k])
    return left != 0


@inside
def arrivals(m, p):
    """Return the length of the list that begins with ``p``."""
    n = 0
    while p >= 0:
        n += 1
        p = m[p + c.NEXT]
    return n


@inside
def run_switches(m, far, buffer, end):
    """Run all coupled nodes of this window; return False where packets may not suffice for the frames of one.

    A node makes at most one frame for each packet that enters or leaves a queue.
    """
    first = m[c.SWITCH_LIST]
    while m[c.AT_SWITCH] < m[c.SWITCHES]:
        at = m[first + m[c.AT_SWITCH]]
        if m[c.FREES] < 2 * arrivals(m, m[at + c.COMING]) + m[at + c.WAITING]:
            return False
        if run_switch(m, far, buffer, at, end):
            m[first + m[c.STIRRED_STILL]] = at
            m[c.STIRRED_STILL] += 1
        else:
            m[at + c.STIRRED] = 0
        m[c.AT_SWITCH] += 1
    m[c.SWITCHES] = m[c.STIRRED_STILL]
    return True


OPEN, HANDED_OUT, SENT = range(3)
"""Phases of a window: nothing of it has happened; what arrives is where it arrives; hosts and lone ports are done."""


@inside
def arrive(m, p, link):
    """Deliver packet ``p`` to the port of ``link`` in this window."""
    if m[link + c.COUPLED]:
        at = m[link + c.NODE]
        m[p + c.NEXT] = m[at + c.COMING]
        m[at + c.COMING] = p
        if not m[at + c.STIRRED]:
            m[at + c.STIRRED] = 1
            m[m[c.SWITCH_LIST] + m[c.SWITCHES]] = at
            m[c.SWITCHES] += 1
    else:
        m[p + c.NEXT] = m[link + c.ARRIVALS]
        m[link + c.ARRIVALS] = p
        if not m[link + c.ACTIVE]:
            m[link + c.ACTIVE] = 1
            m[m[c.ACTIVE_LIST] + m[c.ACTIVES]] = link
            m[c.ACTIVES] += 1


@inside
def next_window(m, far):
    """Advance to the next window in which something may happen; return False where there is none."""
    if m[c.FLYING] == 0 and m[c.ACTIVES] == 0 and m[c.SWITCHES] == 0:
        if m[c.FAR] == 0:
            return False
        m[c.NOW] = m[far[0] + c.TIME] >> m[c.SHIFT]
    while m[c.FAR] > 0 and (m[far[0] + c.TIME] >> m[c.SHIFT]) - m[c.NOW] < c.WHEEL:
        fly(m, far, pop_far(m, far))
    return True


@inside
def hand_out(m):
    """Deliver the arrivals of this window to their ports and hosts."""
    slot = c.WHEEL_AT + (m[c.NOW] & (c.WHEEL - 1))
    p = m[slot]
    m[slot] = -1
    hosts = 0
    while p >= 0:
        following = m[p + c.NEXT]
        m[c.FLYING] -= 1
        kind = m[p + c.WORD] >> c.KIND_SHIFT & c.KIND_MASK
        link = m[m[p + c.WAY] & 0xFFFFFFFF]
        if kind <= c.LAST_CROSSING and link >= 0:
            arrive(m, p, link)
        elif kind >= c.RESUME:
            arrive(m, p, m[p + c.SEQUENCE])
        else:
            node = host_of(m, p)
            if m[node + c.COMING] < 0:
                m[m[c.HOST_LIST] + hosts] = node
                hosts += 1
            m[p + c.NEXT] = m[node + c.COMING]
            m[node + c.COMING] = p
        p = following
    m[c.HOSTS] = hosts
    m[c.AT_HOST] = m[c.AT_EVENT] = m[c.EVENTS] = 0


@inside
def take_over(m, far, buffer, end):
    """Put a host's packets into its ports and its events into their windows, this one included."""
    p = m[c.OUT]
    while p >= 0:
        following = m[p + c.NEXT]
        if m[p + c.WORD] >> c.KIND_SHIFT & c.KIND_MASK <= c.LAST_CROSSING:
            arrive(m, p, m[m[p + c.WAY] & 0xFFFFFFFF])
        elif m[p + c.TIME] < end:
            at = m[c.EVENTS]
            while at > m[c.AT_EVENT] + 1 and before(m, p, buffer[at - 1]):
                buffer[at] = buffer[at - 1]
                at -= 1
            buffer[at] = p
            m[c.EVENTS] += 1
        else:
            fly(m, far, p)
        p = following
    m[c.OUT] = -1


@inside
def run_hosts(m, x, far, buffer, end):
    """Run all hosts of this window; return False where packets may not suffice for what one does next."""
    while m[c.AT_HOST] < m[c.HOSTS]:
        node = m[m[c.HOST_LIST] + m[c.AT_HOST]]
        if m[node + c.COMING] >= 0:
            m[c.EVENTS] = in_order(m, m[node + c.COMING], buffer)
            m[node + c.COMING] = -1
        while m[c.AT_EVENT] < m[c.EVENTS]:
            if m[c.FREES] < m[c.MARGIN]:
                return False
            handle(m, x, buffer[m[c.AT_EVENT]])
            take_over(m, far, buffer, end)
            m[c.AT_EVENT] += 1
        m[c.AT_EVENT] = m[c.EVENTS] = 0
        m[c.AT_HOST] += 1
    return True


@inside
def run_port(m, far, buffer, link, end):
    """Run the port of ``link`` until ``end``; return whether it has more that it may send."""
    n = 0
    if m[link + c.ARRIVALS] >= 0:
        n = in_order(m, m[link + c.ARRIVALS], buffer)
        m[link + c.ARRIVALS] = -1
    i = 0
    while True:
        busy = m[link + c.BUSY]
        if ready(m, link) and (i == n or busy <= m[buffer[i] + c.TIME]):
            if busy >= end:
                break
            p = pick(m, link, busy)
            if send(m, p, link, busy):
                fly(m, far, p)
        elif i < n:
            p = buffer[i]
            i += 1
            if is_pause(m, p):
                apply_pause(m, p, link)
                give_back(m, p)
            elif busy <= m[p + c.TIME] and at_once(m, p, link):
                if send(m, p, link, m[p + c.TIME]):
                    fly(m, far, p)
            else:
                time = m[p + c.TIME]
                admit(m, p, link)
                wake(m, link, time)
        else:
            break
    return ready(m, link) != 0


@inside
def run_ports(m, far, buffer, end):
    """Run every port by itself; those that have more to send stay active."""
    still, first = 0, m[c.ACTIVE_LIST]
    for i in range(m[c.ACTIVES]):
        link = m[first + i]
        if run_port(m, far, buffer, link, end):
            m[first + still] = link
            still += 1
        else:
            m[link + c.ACTIVE] = 0
    m[c.ACTIVES] = still


@inside
def there(m, far):
    """Return whether the next window in which something may happen ends after UNTIL."""
    window = m[c.NOW]
    if m[c.FLYING] == 0 and m[c.ACTIVES] == 0 and m[c.SWITCHES] == 0 and m[c.FAR] > 0:
        window = max(window, m[far[0] + c.TIME] >> m[c.SHIFT])
    return (window + 1) << m[c.SHIFT] > m[c.UNTIL]


@entry
def load(m, far):
    """Put the first events of new flows into their windows."""
    release(m)
    p = m[c.OUT]
    while p >= 0:
        following = m[p + c.NEXT]
        fly(m, far, p)
        p = following
    m[c.OUT] = -1


@entry
def run(m, x, far, buffer, trace, windows):
    """Run at most ``windows`` windows; return the reason to stop, one of those in `state`."""
    for _ in range(windows):
        if m[c.PHASE_OF_WINDOW] == OPEN:
            if m[c.COMPLETED] > 0:
                return c.BREATH
            if there(m, far):
                return c.THERE
            if not next_window(m, far):
                return c.STUCK if m[c.UNFINISHED] > 0 else c.DONE_ALL
            if m[c.TRACE_EVERY] > 0 and not sample(m, trace, m[c.NOW]):
                return c.BREATH
            hand_out(m)
            m[c.PHASE_OF_WINDOW] = HANDED_OUT
        end = (m[c.NOW] + 1) << m[c.SHIFT]
        if m[c.PHASE_OF_WINDOW] == HANDED_OUT:
            if not run_hosts(m, x, far, buffer, end):
                return c.GROW
            run_ports(m, far, buffer, end)
            m[c.PHASE_OF_WINDOW] = SENT
            m[c.AT_SWITCH] = m[c.STIRRED_STILL] = 0
        if not run_switches(m, far, buffer, end):
            return c.GROW
        m[c.PHASE_OF_WINDOW] = OPEN
        m[c.NOW] += 1
    return c.BREATH
