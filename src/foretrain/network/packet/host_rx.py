"""What a host does with what comes to it: data is for a flow's receiver, replies for its sender; steps free others.

    DATA, PROBE ── `came` ──▶ steps have `ended` ──▶ `permit`: who waits for them, here at once, elsewhere with NEWS
    replies, ALARM, PACE ──▶ the flow's sender ──▶ more DATA

Both kernels call `handle` for everything that comes to a host, and take over what it leaves in the outbox.
"""

from __future__ import annotations

from foretrain.network.packet import state as c
from foretrain.network.packet.host_tx import remind
from foretrain.network.packet.jit import inside
from foretrain.network.packet.packets import give_back
from foretrain.network.packet.step_release import allow, ended, permit
from foretrain.network.packet.transports.dispatch import answered, came, drawn, paced, woken


@inside
def host_of(m, p):
    """Where event or packet ``p``, which has no hop left, comes to."""
    f = m[p + c.WAY] >> 32
    kind = m[p + c.WORD] >> c.KIND_SHIFT & c.KIND_MASK
    there = kind == c.DATA or kind == c.PROBE or kind == c.LOCAL or kind == c.DRAW
    return m[f + c.TARGET] if there else m[f + c.SOURCE]


@inside
def own(m, x, p, f, kind, time):
    """An event of the host's own, which packet ``p`` stands for."""
    info = m[p + c.INFO]
    if kind == c.ALARM:
        if m[f + c.ALARM_AT] == time:
            m[f + c.ALARM_AT] = -1
            if m[f + c.DUE] >= 0:
                woken(m, x, f, time)
    elif kind == c.PACE:
        paced(m, x, f, time)
    elif kind == c.DRAW:
        drawn(m, x, m[f + c.TARGET], time)
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
            remind(m, f, c.LOCAL, info + 1, time)


@inside
def handle(m, x, p):
    """Packet or event ``p`` comes to its host."""
    time, f = m[p + c.TIME], m[p + c.WAY] >> 32
    kind = m[p + c.WORD] >> c.KIND_SHIFT & c.KIND_MASK
    if kind > c.LAST_CROSSING:
        if kind != c.ALARM and time > m[c.LAST_TIME]:
            m[c.LAST_TIME] = time
        own(m, x, p, f, kind, time)
        give_back(m, p)
        return
    if time > m[c.LAST_TIME]:
        m[c.LAST_TIME] = time
    if kind == c.DATA or kind == c.PROBE:
        if kind == c.DATA:
            m[c.ARRIVED] += 1
        steps = came(m, x, p, f, kind, time)
        while m[f + c.DONE] < steps:
            ended(m, x, f, m[f + c.DONE] + 1, time)
    else:
        answered(m, x, p, f, kind, time)
        give_back(m, p)
