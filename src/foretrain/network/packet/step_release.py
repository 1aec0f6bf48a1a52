"""Who may go when: steps of flows that have come set others free."""

from __future__ import annotations

from foretrain.network.packet import state as c
from foretrain.network.packet.host_tx import post, remind
from foretrain.network.packet.jit import inside
from foretrain.network.packet.packets import take_free
from foretrain.network.packet.transports.dispatch import begin, more


@inside
def allow(m, x, f, steps, time):
    """Flow ``f`` may send ``steps`` of its steps from ``time`` on."""
    steps = min(steps, m[f + c.STEPS])
    if steps <= m[f + c.ALLOWED]:
        return
    first = m[f + c.ALLOWED]
    m[f + c.ALLOWED] = steps
    if m[m[m[f + c.FORTH]]] < 0:
        # It crosses nothing: steps end as they begin, one by one.
        if first == m[f + c.DONE]:
            remind(m, f, c.LOCAL, first + 1, time)
    else:
        if first == 0:
            begin(m, x, f)
        more(m, x, f, time)


@inside
def permit(m, x, f, time):
    """As many steps of flow ``f`` as what it waits for permits, after its overhead."""
    steps = m[f + c.STEPS]
    for d in range(m[f + c.FIRST_GATE], m[f + c.LAST_GATE], c.GATE_COLUMNS):
        known = m[d + c.SEEN_STEPS]
        if known < m[m[d + c.WAITED] + c.STEPS]:
            steps = min(steps, known - m[d + c.LAG] + 1)
    if steps <= m[f + c.ALLOWED] or m[f + c.ALLOWED] < 0:
        return  # below 0 it is not released
    if m[f + c.OVERHEAD] > 0:
        remind(m, f, c.START, steps, time + m[f + c.OVERHEAD])
    else:
        allow(m, x, f, steps, time)


@inside
def ended(m, x, f, steps, time):
    """``steps`` of flow ``f`` have come; whoever waits for that is told."""
    m[f + c.DONE] = steps
    if steps == m[f + c.STEPS]:
        m[f + c.END] = time
        m[c.UNFINISHED] -= 1
        program = m[f + c.PROGRAM]
        m[program + c.OPEN_FLOWS] -= 1
        if m[program + c.OPEN_FLOWS] == 0:
            m[c.COMPLETED] += 1
    here = m[f + c.TARGET]
    for i in range(m[f + c.FIRST_HEIR], m[f + c.LAST_HEIR]):
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
            m[p + c.TIE] = c.TOLD + (m[other + c.FLOW_NUMBER] << 27) + (d - m[other + c.FIRST_GATE])
            post(m, p)
