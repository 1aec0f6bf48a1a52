"""Hosts that receive: data goes to a flow's receiver, replies to its sender, and finished steps release others.

    DATA, PROBE ── `on_data` ──▶ a step has `ended` ──▶ `permit`: steps that depend on it, elsewhere by NEWS
    replies, ALARM, PACE ──▶ the flow's sender ──▶ more DATA

Both kernels call `handle` for everything that arrives at a host, and take over what it leaves in the outbox.

Calls of a flow's transport:

    sender:    `begin` before its first step · `more` when steps may go · `on_reply` when a reply arrives
               · `on_timer` of its timer · `on_pace` when its rate allows a packet
    receiver:  `on_data` when data or a probe arrives: it answers, and returns how many steps have arrived · `on_pull`
               when its host may pull a packet

A flow that was cancelled is SILENT: it does nothing, and what arrives for it is thrown away.
"""

from __future__ import annotations

from foretrain.network.jit import inside
from foretrain.network.packet import state as c
from foretrain.network.packet.host_tx import post, post_event, set_alarm
from foretrain.network.packet.packets import give_back, take_free
from foretrain.network.packet.transports import bounded, go_back_n, ndp, newreno, pfabric


@inside
def begin(m, x, f):
    """Initialise flow ``f`` before it sends for the first time."""
    protocol = m[f + c.PROTOCOL]
    if protocol == c.WINDOWED:
        newreno.begin(m, x, f)
    elif protocol == c.NEAREST_FIRST:
        pfabric.begin(m, x, f)
    elif protocol == c.PULLED:
        ndp.begin(m, x, f)
    elif protocol == c.IN_ORDER:
        go_back_n.begin(m, x, f)
    elif protocol == c.BOUNDED:
        bounded.begin(m, x, f)


@inside
def more(m, x, f, time):
    """Let flow ``f`` send, because more steps are allowed."""
    protocol = m[f + c.PROTOCOL]
    if protocol == c.WINDOWED:
        newreno.more(m, x, f, time)
    elif protocol == c.NEAREST_FIRST:
        pfabric.more(m, x, f, time)
    elif protocol == c.PULLED:
        ndp.more(m, x, f, time)
    elif protocol == c.IN_ORDER:
        go_back_n.more(m, x, f, time)
    elif protocol == c.BOUNDED:
        bounded.more(m, x, f, time)


@inside
def on_data(m, x, p, f, kind, time):
    """Give packet ``p`` of ``kind`` to the receiver, which keeps it; return how many steps have arrived."""
    protocol = m[f + c.PROTOCOL]
    if protocol == c.WINDOWED:
        return newreno.on_data(m, x, p, f, time)
    if protocol == c.NEAREST_FIRST:
        return pfabric.on_data(m, x, p, f, time)
    if protocol == c.PULLED:
        return ndp.on_data(m, x, p, f, time)
    if protocol == c.IN_ORDER:
        return go_back_n.on_data(m, x, p, f, time)
    if protocol == c.BOUNDED:
        return bounded.on_data(m, x, p, f, kind, time)
    give_back(m, p)
    return m[f + c.DONE]


@inside
def avoid(m, x, f, word):
    """Note whether the path that a reply repeats met congestion."""
    if m[f + c.PATH_COUNT] == 1 or x[m[f + c.TRANSPORT] + c.ADAPTIVE] == 0.0:
        return
    bit = 1 << (word >> c.ROUTE_SHIFT & 63)
    if word & c.MARKED:
        m[f + c.AVOID] |= bit
    else:
        m[f + c.AVOID] &= ~bit


@inside
def on_reply(m, x, p, f, kind, time):
    """Give reply ``p`` of ``kind`` to the sender of flow ``f``."""
    protocol = m[f + c.PROTOCOL]
    if kind == c.ACK:
        avoid(m, x, f, m[p + c.WORD])
    if protocol == c.WINDOWED:
        newreno.on_reply(m, x, p, f, time)
    elif protocol == c.NEAREST_FIRST:
        pfabric.on_reply(m, x, p, f, time)
    elif protocol == c.PULLED:
        ndp.on_reply(m, x, p, f, kind, time)
    elif protocol == c.IN_ORDER:
        go_back_n.on_reply(m, x, p, f, kind, time)
    elif protocol == c.BOUNDED:
        bounded.on_reply(m, x, p, f, kind, time)


@inside
def on_timer(m, x, f, time):
    """Check the timer of flow ``f``."""
    if time < m[f + c.DUE]:
        # What came since has moved it.
        set_alarm(m, f, m[f + c.DUE])
        return
    protocol = m[f + c.PROTOCOL]
    if protocol == c.WINDOWED:
        newreno.on_timeout(m, x, f, time)
    elif protocol == c.NEAREST_FIRST:
        pfabric.on_timeout(m, x, f, time)
    elif protocol == c.PULLED:
        ndp.on_timeout(m, x, f, time)
    elif protocol == c.IN_ORDER:
        go_back_n.on_timeout(m, x, f, time)
    elif protocol == c.BOUNDED:
        bounded.on_timeout(m, x, f, time)


@inside
def on_pace(m, x, f, time):
    """Let flow ``f`` send the next packet that its rate allows."""
    if m[f + c.PROTOCOL] == c.IN_ORDER:
        go_back_n.on_pace(m, x, f, time)
    elif m[f + c.PROTOCOL] == c.BOUNDED:
        bounded.on_pace(m, x, f, time)


@inside
def on_pull(m, x, node, time):
    """Let host ``node`` pull a packet."""
    ndp.on_pull(m, x, node, time)


@inside
def allow(m, x, f, steps, time):
    """Allow flow ``f`` to send ``steps`` of its steps from ``time`` on."""
    steps = min(steps, m[f + c.STEPS])
    if steps <= m[f + c.ALLOWED]:
        return
    first = m[f + c.ALLOWED]
    m[f + c.ALLOWED] = steps
    if m[m[m[f + c.PATHS]]] < 0:
        # It crosses nothing: steps end as they begin, one by one.
        if first == m[f + c.DONE]:
            post_event(m, f, c.LOCAL, first + 1, time)
    else:
        if first == 0:
            begin(m, x, f)
        more(m, x, f, time)


@inside
def permit(m, x, f, time):
    """Allow as many steps of flow ``f`` as its dependencies permit, after its overhead."""
    steps = m[f + c.STEPS]
    for d in range(m[f + c.FIRST_DEPENDENCY], m[f + c.LAST_DEPENDENCY], c.DEPENDENCY_COLUMNS):
        known = m[d + c.SEEN_STEPS]
        if known < m[m[d + c.WAITED] + c.STEPS]:
            steps = min(steps, known - m[d + c.LAG] + 1)
    if steps <= m[f + c.ALLOWED] or m[f + c.ALLOWED] < 0:
        return  # below 0 it is not released
    if m[f + c.OVERHEAD] > 0:
        post_event(m, f, c.START, steps, time + m[f + c.OVERHEAD])
    else:
        allow(m, x, f, steps, time)


@inside
def ended(m, x, f, steps, time):
    """Note that ``steps`` of flow ``f`` have arrived, and release the steps that depend on them."""
    m[f + c.DONE] = steps
    if steps == m[f + c.STEPS]:
        m[f + c.END] = time
        m[c.UNFINISHED] -= 1
        program = m[f + c.PROGRAM]
        m[program + c.OPEN_FLOWS] -= 1
        if m[program + c.OPEN_FLOWS] == 0:
            m[c.COMPLETED] += 1
    here = m[f + c.TARGET]
    for i in range(m[f + c.FIRST_DEPENDENT], m[f + c.LAST_DEPENDENT]):
        d = m[i]
        other = m[d + c.WAITER]
        if m[other + c.SOURCE] == here:
            m[d + c.SEEN_STEPS] = steps
            permit(m, x, other, time)
        else:
            # Nothing is known elsewhere in no time: it takes what the shortest link does.
            p = take_free(m)
            m[p + c.TIME] = time + (1 << m[c.SHIFT])
            m[p + c.WORD] = c.NEWS << c.KIND_SHIFT
            m[p + c.WAY] = other << 32
            m[p + c.SEQUENCE] = d
            m[p + c.INFO] = steps
            m[p + c.TIE] = c.TOLD + (m[other + c.FLOW_NUMBER] << 27) + (d - m[other + c.FIRST_DEPENDENCY])
            post(m, p)


@inside
def host_of(m, p):
    """Return the host at which event or packet ``p``, which has no hop left, arrives."""
    f = m[p + c.WAY] >> 32
    kind = m[p + c.WORD] >> c.KIND_SHIFT & c.KIND_MASK
    there = kind == c.DATA or kind == c.PROBE or kind == c.LOCAL or kind == c.DRAW
    return m[f + c.TARGET] if there else m[f + c.SOURCE]


@inside
def on_host_event(m, x, p, f, kind, time):
    """Handle an event of the host's own, which packet ``p`` stands for."""
    info = m[p + c.INFO]
    if kind == c.ALARM:
        if m[f + c.ALARM_AT] == time:
            m[f + c.ALARM_AT] = -1
            if m[f + c.DUE] >= 0:
                on_timer(m, x, f, time)
    elif kind == c.PACE:
        on_pace(m, x, f, time)
    elif kind == c.DRAW:
        on_pull(m, x, m[f + c.TARGET], time)
    elif kind == c.START:
        if info > 0:
            allow(m, x, f, info, time)
        else:
            m[f + c.ALLOWED] = 0
            permit(m, x, f, time)
    elif kind == c.NEWS:
        d = m[p + c.SEQUENCE]
        if info > m[d + c.SEEN_STEPS]:
            m[d + c.SEEN_STEPS] = info
            permit(m, x, f, time)
    else:
        ended(m, x, f, info, time)
        if info < m[f + c.ALLOWED]:
            post_event(m, f, c.LOCAL, info + 1, time)


@inside
def handle(m, x, p):
    """Handle packet or event ``p`` at its host."""
    time, f = m[p + c.TIME], m[p + c.WAY] >> 32
    kind = m[p + c.WORD] >> c.KIND_SHIFT & c.KIND_MASK
    if kind > c.LAST_CROSSING:
        if kind != c.ALARM and time > m[c.LAST_TIME]:
            m[c.LAST_TIME] = time
        on_host_event(m, x, p, f, kind, time)
        give_back(m, p)
        return
    if time > m[c.LAST_TIME]:
        m[c.LAST_TIME] = time
    if kind == c.DATA or kind == c.PROBE:
        if kind == c.DATA:
            m[c.ARRIVED] += 1
        steps = on_data(m, x, p, f, kind, time)
        while m[f + c.DONE] < steps:
            ended(m, x, f, m[f + c.DONE] + 1, time)
    else:
        on_reply(m, x, p, f, kind, time)
        give_back(m, p)
