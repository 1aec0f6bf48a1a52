"""Switches whose ports influence each other within a window, since they share a buffer or pause who sends to them: all
that happens at one of them is merged, and its ports are searched for who departs first."""

from __future__ import annotations

from foretrain.network.packet import state as c
from foretrain.network.packet.jit import inside
from foretrain.network.packet.packets import fly, give_back, in_order
from foretrain.network.packet.pfc import is_pause, obey
from foretrain.network.packet.queues import admit, at_once, pick, ready, send, wake


@inside
def first_to_depart(m, first, last, end):
    """Of the ports that are listed from ``first`` to ``last`` the first that can send before ``end``, or -1; the lower
    link of two at one instant."""
    best, time = -1, end
    for k in range(first, last):
        link = m[k]
        if m[link + c.BUSY] < time and ready(m, link):
            best, time = link, m[link + c.BUSY]
    return best


@inside
def asked(m, far):
    """A frame that pauses somebody goes, if one was made."""
    if m[c.ASKING] >= 0:
        fly(m, far, m[c.ASKING])
        m[c.ASKING] = -1


@inside
def run_switch(m, far, buffer, at, end):
    """What node ``at`` does before ``end``; whether one of its ports has more that it may send."""
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
            asked(m, far)
            if send(m, p, link, busy):
                fly(m, far, p)
        elif i < n:
            p = buffer[i]
            i += 1
            if is_pause(m, p):
                obey(m, p, m[p + c.SEQUENCE])
                give_back(m, p)
                continue
            link = m[m[p + c.WAY] & 0xFFFFFFFF]
            if m[link + c.BUSY] <= m[p + c.TIME] and at_once(m, p, link):
                if send(m, p, link, m[p + c.TIME]):
                    fly(m, far, p)
            else:
                time = m[p + c.TIME]
                admit(m, p, link)
                asked(m, far)
                wake(m, link, time)
        else:
            break
    left = 0
    for k in range(first, last):
        left |= ready(m, m[k])
    return left != 0


@inside
def arrivals(m, p):
    """How many the list that begins with ``p`` has."""
    n = 0
    while p >= 0:
        n += 1
        p = m[p + c.NEXT]
    return n


@inside
def run_switches(m, far, buffer, end):
    """All coupled nodes to look at; False where packets may not suffice for the frames that one makes: at most one for
    each packet that comes to wait or goes."""
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
