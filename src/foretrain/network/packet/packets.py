"""Packets in the memory of a kernel: the list of free ones, their order, and one bit per packet of a flow."""

from __future__ import annotations

from foretrain.network.jit import inside
from foretrain.network.packet import state as c


@inside
def take_free(m):
    """Return a free packet; there is one, since kernels look at FREES before they let a host act."""
    p = m[c.FREE]
    m[c.FREE] = m[p + c.NEXT]
    m[c.FREES] -= 1
    return p


@inside
def give_back(m, p):
    """Free packet ``p``."""
    m[p + c.NEXT] = m[c.FREE]
    m[c.FREE] = p
    m[c.FREES] += 1


@inside
def drop(m, p, link, of):
    """Drop packet ``p`` at ``link``, counted as one of class ``of``."""
    m[link + c.TALLY + 8 * of + c.DROPPED] += 1
    m[link + c.TALLY + 8 * of + c.DROPPED_BYTES] += m[p + c.WORD] & c.SIZE_MASK
    m[c.DROPS] += 1
    give_back(m, p)


@inside
def before(m, one, other):
    """Return whether packet ``one`` arrives before ``other``."""
    if m[one + c.TIME] != m[other + c.TIME]:
        return m[one + c.TIME] < m[other + c.TIME]
    return m[one + c.TIE] < m[other + c.TIE]


@inside
def in_order(m, first, buffer):
    """Write the list that begins with ``first`` into ``buffer`` in the order of arrival; return its length.

    Lists are stacks, of some senders whose packets come in order each: read from the end they are nearly sorted, and
    insertion is fast. Long ones are merged from sorted runs, in the other half of the buffer and back.
    """
    n = 0
    while first >= 0:
        buffer[n] = first
        n += 1
        first = m[first + c.NEXT]
    for i in range(n >> 1):
        buffer[i], buffer[n - 1 - i] = buffer[n - 1 - i], buffer[i]
    run = n if n <= 32 else 16
    for begin in range(0, n, run):
        for i in range(begin + 1, min(begin + run, n)):
            p, at = buffer[i], i
            while at > begin and before(m, p, buffer[at - 1]):
                buffer[at] = buffer[at - 1]
                at -= 1
            buffer[at] = p
    half = len(buffer) >> 1
    source, target = 0, half
    while run < n:
        for begin in range(0, n, 2 * run):
            left, middle, end = begin, min(begin + run, n), min(begin + 2 * run, n)
            right = middle
            for at in range(begin, end):
                if left < middle and (right >= end or not before(m, buffer[source + right], buffer[source + left])):
                    buffer[target + at] = buffer[source + left]
                    left += 1
                else:
                    buffer[target + at] = buffer[source + right]
                    right += 1
        source, target = target, source
        run *= 2
    if source:
        for i in range(n):
            buffer[i] = buffer[source + i]
    return n


@inside
def push_far(m, far, p):
    """Add packet ``p`` to the heap of arrivals beyond the wheel."""
    at = m[c.FAR]
    m[c.FAR] = at + 1
    time = m[p + c.TIME]
    while at > 0:
        above = (at - 1) >> 1
        if m[far[above] + c.TIME] <= time:
            break
        far[at] = far[above]
        at = above
    far[at] = p


@inside
def pop_far(m, far):
    """Remove and return the first packet of that heap."""
    top = far[0]
    n = m[c.FAR] - 1
    m[c.FAR] = n
    p, at = far[n], 0
    while True:
        child = 2 * at + 1
        if child >= n:
            break
        if child + 1 < n and m[far[child + 1] + c.TIME] < m[far[child] + c.TIME]:
            child += 1
        if m[far[child] + c.TIME] >= m[p + c.TIME]:
            break
        far[at] = far[child]
        at = child
    far[at] = p
    return top


@inside
def fly(m, far, p):
    """Put packet ``p`` on its way to where it arrives."""
    window = m[p + c.TIME] >> m[c.SHIFT]
    if window - m[c.NOW] < c.WHEEL:
        slot = c.WHEEL_AT + (window & (c.WHEEL - 1))
        m[p + c.NEXT] = m[slot]
        m[slot] = p
        m[c.FLYING] += 1
    else:
        push_far(m, far, p)


FULL_WORD = (1 << 32) - 1


@inside
def is_set(m, at):
    """Return whether bit ``at`` is set."""
    return m[at >> 5] >> (at & 31) & 1


@inside
def put(m, at):
    """Set bit ``at``."""
    m[at >> 5] |= 1 << (at & 31)


@inside
def take(m, at):
    """Clear bit ``at``."""
    m[at >> 5] &= ~(1 << (at & 31))


@inside
def first_unset(m, at, end):
    """Return the first bit from ``at`` on that is not set, or ``end``."""
    while at < end:
        if not at & 31 and m[at >> 5] == FULL_WORD:
            at += 32
        elif is_set(m, at):
            at += 1
        else:
            return at
    return end


@inside
def first_set(m, at, end):
    """Return the first bit from ``at`` on that is set, or ``end``."""
    while at < end:
        if not at & 31 and m[at >> 5] == 0:
            at += 32
        elif is_set(m, at):
            return at
        else:
            at += 1
    return end


@inside
def record(m, f, p):
    """Note the arrival of packet ``p`` of flow ``f``; return whether it is new. A trimmed packet does not count."""
    sequence = m[p + c.SEQUENCE]
    at = m[f + c.BITS] + sequence
    if m[p + c.WORD] & c.CUT or is_set(m, at):
        return False
    put(m, at)
    if sequence == m[f + c.EXPECTED]:
        end = m[f + c.BITS] + m[f + c.PACKETS] * m[f + c.STEPS]
        m[f + c.EXPECTED] = first_unset(m, at + 1, end) - m[f + c.BITS]
    return True
