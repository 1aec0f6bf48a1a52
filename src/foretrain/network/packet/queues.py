"""Ports: queues, marking, drops, priority flow control, and losses on the wire, for both kernels.

pFabric's queue (Alizadeh et al., SIGCOMM 2013, 4.1): all classes share one short list, which is searched. Of the flow
of the packet with the least to go, the oldest packet is sent, so that no flow's packets overtake each other; the packet
with the most to go is dropped where there is no room. Replies go before all data.

Priority flow control (IEEE 802.1Qbb): a packet that waits counts for the link that it came over. Where those of a class
exceed XOFF the node before that link is asked to pause it; where they have fallen to XON it may go on. The frame takes
what the link takes, before all else. It and buffers that the ports of a switch share are what couples its ports.
"""

from __future__ import annotations

from foretrain.network.jit import inside
from foretrain.network.packet import state as c
from foretrain.network.packet.packets import drop, give_back, take_free
from foretrain.network.routing.kernels import mix

FRAME = 84
"""Bytes of a pause frame on the wire."""


@inside
def make_pause_frame(m, kind, came, of, time):
    """Make a frame of ``kind`` for the port of link ``came``, of class ``of``."""
    p = take_free(m)
    m[p + c.TIME] = time + m[came + c.DELAY] + (FRAME * m[came + c.RATE] >> 16)
    m[p + c.WORD] = kind << c.KIND_SHIFT | of << c.CLASS_SHIFT
    m[p + c.SEQUENCE] = came
    m[p + c.TIE] = c.OWN + (m[came + c.NUMBER] << 8) + (of << 4) + kind
    m[c.ASKING] = p


@inside
def on_enqueue(m, p, link, of, size, time):
    """Count packet ``p``, which has entered a queue of ``link``, whose node is coupled."""
    at, row = m[link + c.NODE], m[link + c.SETTING]
    m[at + c.POOL] += size
    m[at + c.WAITING] += 1
    came = m[p + c.TIE]
    if came < c.OWN:
        m[came + c.HELD + of] += size
        if m[came + c.HELD + of] > m[row + c.XOFF + of] and not m[came + c.ASKED] >> of & 1:
            m[came + c.ASKED] |= 1 << of
            m[c.PAUSES] += 1
            make_pause_frame(m, c.PAUSE, came, of, time)


@inside
def on_dequeue(m, p, link, of, size, time):
    """Count packet ``p``, which has left a queue of ``link``, whose node is coupled."""
    at, row = m[link + c.NODE], m[link + c.SETTING]
    m[at + c.POOL] -= size
    m[at + c.WAITING] -= 1
    came = m[p + c.TIE]
    if came < c.OWN:
        m[came + c.HELD + of] -= size
        if m[came + c.ASKED] >> of & 1 and m[came + c.HELD + of] <= m[row + c.XON + of]:
            m[came + c.ASKED] &= ~(1 << of)
            make_pause_frame(m, c.RESUME, came, of, time)


@inside
def is_pause(m, p):
    """Return whether ``p`` is a frame that pauses or resumes a port."""
    kind = m[p + c.WORD] >> c.KIND_SHIFT & c.KIND_MASK
    return kind == c.PAUSE or kind == c.RESUME


@inside
def apply_pause(m, p, link):
    """Pause the port of ``link``, or let it go on, as frame ``p`` says."""
    word = m[p + c.WORD]
    bit = 1 << (word >> c.CLASS_SHIFT & c.CLASS_MASK)
    if word >> c.KIND_SHIFT & c.KIND_MASK == c.PAUSE:
        m[link + c.PAUSED] |= bit
    else:
        m[link + c.PAUSED] &= ~bit
        # What waited can go from now on, not from when the port became free.
        m[link + c.BUSY] = max(m[link + c.BUSY], m[p + c.TIME])


@inside
def remaining(m, p):
    """Return the packets that the flow of ``p`` had to send when ``p`` was sent; -1 for a reply."""
    return m[p + c.INFO] if m[p + c.WORD] >> c.KIND_SHIFT & c.KIND_MASK == c.DATA else -1


@inside
def unlink(m, link, ahead, p):
    """Remove ``p``, which is behind ``ahead`` (-1: it is the first), from the list of ``link``."""
    if ahead < 0:
        m[link + c.HEAD] = m[p + c.NEXT]
    else:
        m[ahead + c.NEXT] = m[p + c.NEXT]
    if m[link + c.TAIL] == p:
        m[link + c.TAIL] = ahead
    size = m[p + c.WORD] & c.SIZE_MASK
    m[link + c.BYTES] -= size
    m[link + c.TOTAL] -= size
    if m[link + c.HEAD] < 0:
        m[link + c.MASK] = 0


@inside
def pick_nearest(m, link):
    """Remove and return the packet that ``link`` sends next."""
    p = m[link + c.HEAD]
    best, least = p, remaining(m, p)
    while p >= 0:
        if remaining(m, p) < least:
            best, least = p, remaining(m, p)
        p = m[p + c.NEXT]
    flow = m[best + c.WAY] >> 32
    ahead, p = -1, m[link + c.HEAD]
    while m[p + c.WAY] >> 32 != flow or (remaining(m, p) < 0) != (least < 0):
        ahead, p = p, m[p + c.NEXT]
    unlink(m, link, ahead, p)
    return p


@inside
def admit_nearest(m, p, link):
    """Add ``p`` to the list of ``link``; packets with more to go are dropped for it."""
    size = m[p + c.WORD] & c.SIZE_MASK
    m[link + c.SEEN] += 1
    while m[link + c.TOTAL] + size > m[m[link + c.SETTING] + c.ROOM]:
        worst, before_worst, most = -1, -1, remaining(m, p)
        ahead, q = -1, m[link + c.HEAD] if m[link + c.MASK] else -1
        while q >= 0:
            if remaining(m, q) > most:
                worst, before_worst, most = q, ahead, remaining(m, q)
            ahead, q = q, m[q + c.NEXT]
        if worst < 0:
            drop(m, p, link, 0)
            return
        unlink(m, link, before_worst, worst)
        drop(m, worst, link, 0)
    m[p + c.NEXT] = -1
    if m[link + c.MASK]:
        m[m[link + c.TAIL] + c.NEXT] = p
    else:
        m[link + c.HEAD], m[link + c.MASK] = p, 1
    m[link + c.TAIL] = p
    m[link + c.BYTES] += size
    m[link + c.TOTAL] += size
    m[link + c.TALLY + c.DEEPEST] = max(m[link + c.TALLY + c.DEEPEST], m[link + c.TOTAL])


@inside
def chance(m, which, number, salt):
    """Return a uint32 that depends on the seed, on ``which`` port or flow and on the ``number`` of its packet."""
    return mix(mix(mix(m[c.SEED] ^ salt) ^ (which & 0xFFFFFFFF)) ^ (number & 0xFFFFFFFF))


@inside
def marks(m, link, row, of, held):
    """Return whether a packet that finds ``held`` bytes of class ``of`` is marked: RED on the present queue."""
    low, high = m[row + c.MARK_FROM + of], m[row + c.MARK_TO + of]
    if held <= low:
        return False
    if held > high:
        return True
    below = m[row + c.MARK_CHANCE] * ((held - low) / (high - low))
    return chance(m, m[link + c.NUMBER], m[link + c.SEEN], 1) < below


@inside
def full(m, link, of, size):
    """Return whether class ``of`` of ``link`` has no room for ``size`` bytes more."""
    row, held = m[link + c.SETTING], m[link + c.BYTES + 3 * of]
    if held + size > m[row + c.LIMIT + of] or m[link + c.TOTAL] + size > m[row + c.ROOM]:
        return True
    if not m[link + c.COUPLED]:
        return False
    # Choudhury and Hahne 1998: the more is free, the more one queue may have.
    free = min(m[row + c.SHARED] - m[m[link + c.NODE] + c.POOL], 1 << 40)
    return size > free or held + size > m[row + c.SHARE + of] * free >> 8


@inside
def admit(m, p, link):
    """Add packet ``p`` to a queue of ``link``, which cannot send it now; or mark, trim or drop it."""
    row = m[link + c.SETTING]
    if m[row + c.NEAREST]:
        admit_nearest(m, p, link)
        return
    word = m[p + c.WORD]
    size, of = word & c.SIZE_MASK, (word >> c.CLASS_SHIFT) & c.CLASS_MASK
    held = m[link + c.BYTES + 3 * of]
    m[link + c.SEEN] += 1
    data = word >> c.KIND_SHIFT & c.KIND_MASK == c.DATA
    if full(m, link, of, size) or (data and not word & c.ECT and held > m[row + c.SPARE + of]):
        cut_to = m[row + c.CUT_TO]
        if not data or word & c.CUT or cut_to == 0 or full(m, link, 0, cut_to):
            drop(m, p, link, of)
            return
        m[link + c.TALLY + 8 * of + c.CUT_DOWN] += 1
        m[c.CUTS] += 1
        word = (word & ~(c.SIZE_MASK | c.CLASS_MASK << c.CLASS_SHIFT)) | cut_to | c.CUT
        m[p + c.WORD] = word
        size, of, held = cut_to, 0, m[link + c.BYTES]
    elif word & c.ECT and marks(m, link, row, of, held):
        m[p + c.WORD] = word | c.MARKED
        m[link + c.TALLY + 8 * of + c.MARKS] += 1
    at = c.HEAD + 3 * of
    time = m[p + c.TIME]
    m[p + c.NEXT] = -1
    if m[link + c.MASK] >> of & 1:
        m[m[link + at + 1] + c.NEXT] = p
    else:
        m[link + at] = p
        m[link + c.MASK] |= 1 << of
    m[link + at + 1] = p
    m[link + at + 2] = held + size
    m[link + c.TOTAL] += size
    if held + size > m[link + c.TALLY + 8 * of + c.DEEPEST]:
        m[link + c.TALLY + 8 * of + c.DEEPEST] = held + size
    if m[link + c.COUPLED]:
        on_enqueue(m, p, link, of, size, time)


@inside
def turn(m, link, row, mask):
    """Return the class of ``mask`` that sends next by deficit round robin (Shreedhar and Varghese 1995)."""
    first = m[row + c.STRICT]
    of = m[link + c.TURN]
    while True:
        if mask >> of & 1:
            size = m[m[link + c.HEAD + 3 * of] + c.WORD] & c.SIZE_MASK
            if size <= m[link + c.DEFICIT + of]:
                m[link + c.DEFICIT + of] -= size
                m[link + c.TURN] = of
                return of
        else:
            m[link + c.DEFICIT + of] = 0  # who has nothing to send saves nothing up
        of = of + 1 if of + 1 < c.CLASSES else first
        m[link + c.DEFICIT + of] += m[row + c.QUANTUM + of]


@inside
def ready(m, link):
    """Return the classes of which ``link`` has a packet that it may send."""
    return m[link + c.MASK] & ~m[link + c.PAUSED]


@inside
def pick(m, link, time):
    """Remove and return the packet that ``link`` sends next, at ``time``; there is one that it may send."""
    mask, row = ready(m, link), m[link + c.SETTING]
    if m[row + c.NEAREST]:
        return pick_nearest(m, link)
    strict = m[row + c.STRICT]
    if mask & ((1 << strict) - 1) or strict == c.CLASSES:
        of = 0
        while not mask >> of & 1:
            of += 1
    else:
        of = turn(m, link, row, mask)
    at = c.HEAD + 3 * of
    p = m[link + at]
    size = m[p + c.WORD] & c.SIZE_MASK
    m[link + at] = m[p + c.NEXT]
    m[link + at + 2] -= size
    m[link + c.TOTAL] -= size
    if m[p + c.NEXT] < 0:
        m[link + c.MASK] &= ~(1 << of)
    if m[link + c.COUPLED]:
        on_dequeue(m, p, link, of, size, time)
    return p


@inside
def at_once(m, p, link):
    """Return whether ``link``, which is free with nothing to send, sends packet ``p`` without a look at queues."""
    return not m[link + c.PAUSED] or not m[link + c.PAUSED] >> (m[p + c.WORD] >> c.CLASS_SHIFT & 7) & 1


@inside
def wake(m, link, time):
    """Note an arrival at ``link``, which may have been paused: it sends nothing before ``time``.

    A packet that is trimmed changes its class, and the new one may not be paused.
    """
    m[link + c.BUSY] = max(m[link + c.BUSY], time)


@inside
def lost(m, link):
    """Return whether the wire loses the packet that is sent now."""
    number = m[link + c.SENT_ON]
    below = m[link + c.LOSES]
    if m[link + c.BEGINS] > 0:
        flips = m[link + c.ENDS] if m[link + c.IN_BURST] else m[link + c.BEGINS]
        if chance(m, m[link + c.NUMBER], number, 2) < flips:
            m[link + c.IN_BURST] ^= 1
        if m[link + c.IN_BURST]:
            below = m[link + c.LOSES_IN_BURST]
    return chance(m, m[link + c.NUMBER], number, 3) < below


@inside
def send(m, p, link, start):
    """Send packet ``p`` over ``link`` from ``start`` on; return whether it arrives."""
    word = m[p + c.WORD]
    size, of = word & c.SIZE_MASK, (word >> c.CLASS_SHIFT) & c.CLASS_MASK
    busy = start + ((size * m[link + c.RATE] + 0x8000) >> 16)
    m[link + c.BUSY] = busy
    m[link + c.SENT_ON] += 1
    m[link + c.TALLY + 8 * of + c.PACKETS_OUT] += 1
    m[link + c.TALLY + 8 * of + c.BYTES_OUT] += size
    m[c.HOPS] += 1
    if word >> c.KIND_SHIFT & c.KIND_MASK == c.DATA:
        m[c.DATA_HOPS] += 1
    m[p + c.TIME] = busy + m[link + c.DELAY]
    m[p + c.WAY] += 1
    m[p + c.TIE] = link
    if m[link + c.LOSES] | m[link + c.BEGINS] and lost(m, link):
        m[link + c.TALLY + 8 * of + c.LOST] += 1
        m[c.LOSSES] += 1
        give_back(m, p)
        return False
    return True


@inside
def sample(m, trace, window):
    """Note the bytes in watched queues as ``window`` begins, if it is time; return False where there is no room.

    Samples of windows in which nothing happens are left out: they equal the next row.
    """
    number = window // m[c.TRACE_EVERY]
    if number <= m[c.LAST_TRACE]:
        return True
    row = m[c.TRACED]
    if row == len(trace):
        return False
    trace[row, 0] = number
    for k in range(m[c.WATCHED], m[c.LAST_WATCHED]):
        trace[row, 1 + k - m[c.WATCHED]] = m[m[k] + c.TOTAL]
    m[c.TRACED] = row + 1
    m[c.LAST_TRACE] = number
    return True
