"""Hosts that send: packets and events of their own, which wait in the outbox for the kernel.

Also the retransmission timeout (RFC 6298), and PIAS (Bai et al., NSDI 2015): the more of a message has gone, the lower
the class of its packets, so that short messages overtake long ones though nobody knows their sizes.
"""

from __future__ import annotations

from foretrain.network.jit import inside
from foretrain.network.packet import state as c
from foretrain.network.packet.packets import is_set, take_free
from foretrain.network.packet.queues import chance


@inside
def demoted(x, transport, of, place):
    """Return the class of the packet at ``place`` of a step that begins in class ``of`` (PIAS)."""
    for k in range(int(x[transport + c.DEMOTIONS])):
        if place >= x[transport + c.DEMOTED_FROM + k] and of + 1 < c.CLASSES:
            of += 1
    return of


@inside
def post(m, p):
    """Put packet ``p`` into the outbox."""
    m[p + c.NEXT] = -1
    if m[c.OUT] < 0:
        m[c.OUT] = p
    else:
        m[m[c.LAST_OUT] + c.NEXT] = p
    m[c.LAST_OUT] = p


@inside
def stamp(m):
    """Return the order of the next packet among those of its host, in which both kernels agree."""
    n = m[c.STAMPS]
    m[c.STAMPS] = n + 1
    return c.SENT + n


@inside
def next_way(m, f):
    """Return the path of the next packet of flow ``f``: in turn, skipping those that last met congestion."""
    ways, way = m[f + c.PATH_COUNT], 0
    if ways == 1:
        return way
    for _ in range(ways):
        way = (m[f + c.FLOW_NUMBER] + m[f + c.SPREAD]) % ways
        m[f + c.SPREAD] += 1
        if not m[f + c.AVOID] >> (way & 63) & 1:
            return way
    m[f + c.AVOID] = 0  # all did: they are as good as each other
    return way


@inside
def protected(m, x, f, sequence, again):
    """Return whether packet ``sequence``, a repetition where ``again``, is to be marked rather than dropped."""
    transport = m[f + c.TRANSPORT]
    if x[transport + c.MARKABLE] > 0.0 or m[f + c.WHOLE] or (again and x[transport + c.INSISTENT] > 0.0):
        return True
    if m[f + c.VITAL] >= 0 and is_set(m, m[f + c.VITAL] + sequence):
        return True
    below = x[transport + c.IMPORTANT]
    return below > 0.0 and chance(m, m[f + c.FLOW_NUMBER], sequence, 4) < below


@inside
def class_of(m, x, f, place):
    """Return the class of the packet at ``place`` of a step."""
    transport = m[f + c.TRANSPORT]
    of = max(m[f + c.OWN_CLASS], int(x[transport + c.LEAST_CLASS]))
    return demoted(x, transport, of, place)


@inside
def send_data(m, x, f, sequence, info, time):
    """Send packet ``sequence`` of flow ``f``; return its bytes on the wire."""
    place = sequence % m[f + c.PACKETS]
    size = m[f + c.FULL] if place + 1 < m[f + c.PACKETS] else m[f + c.LAST_SIZE]
    m[f + c.SENT_PACKETS] += 1
    again = sequence < m[f + c.TOP]
    if again:
        m[f + c.SENT_AGAIN] += 1
    else:
        m[f + c.TOP] = sequence + 1
    if m[f + c.BEGUN] < 0:
        m[f + c.BEGUN] = time
    way = next_way(m, f)
    p = take_free(m)
    m[p + c.TIME] = time
    word = size | class_of(m, x, f, place) << c.CLASS_SHIFT | c.DATA << c.KIND_SHIFT | way << c.ROUTE_SHIFT
    if protected(m, x, f, sequence, again):
        word |= c.ECT
    m[p + c.WORD] = word
    m[p + c.WAY] = f << 32 | m[m[f + c.PATHS] + way]
    m[p + c.SEQUENCE] = sequence
    m[p + c.INFO] = info
    m[p + c.STAMP] = time
    m[p + c.TIE] = stamp(m)
    post(m, p)
    return size


@inside
def answer(m, x, p, f, kind, info, time):
    """Turn data packet ``p`` into a reply of ``kind``, which keeps its time stamp, path and mark."""
    word = m[p + c.WORD] & (c.MARKED | c.ROUTE_MASK << c.ROUTE_SHIFT)
    size = int(x[m[f + c.TRANSPORT] + c.REPLY_SIZE])
    m[p + c.TIME] = time
    m[p + c.WORD] = word | size | kind << c.KIND_SHIFT
    m[p + c.WAY] = f << 32 | m[f + c.ACK_PATH]
    m[p + c.INFO] = info
    m[p + c.TIE] = stamp(m)
    post(m, p)


@inside
def signal(m, f, kind, way, size, sequence, info, time):
    """Send a packet of ``kind`` over the path that begins at ``way``, in class 0."""
    p = take_free(m)
    m[p + c.TIME] = time
    m[p + c.WORD] = size | kind << c.KIND_SHIFT
    m[p + c.WAY] = f << 32 | way
    m[p + c.SEQUENCE] = sequence
    m[p + c.INFO] = info
    m[p + c.STAMP] = time
    m[p + c.TIE] = stamp(m)
    post(m, p)


@inside
def post_event(m, f, kind, info, time):
    """Post an event of ``kind`` to an end of flow ``f``."""
    p = take_free(m)
    m[p + c.TIME] = time
    m[p + c.WORD] = kind << c.KIND_SHIFT
    m[p + c.WAY] = f << 32
    m[p + c.INFO] = info
    m[p + c.TIE] = c.OWN + (m[f + c.FLOW_NUMBER] << 4) + kind
    post(m, p)


@inside
def release(m):
    """Post the release of every new flow."""
    for f in range(m[c.FIRST_FLOW], m[c.LAST_FLOW], c.FLOW_COLUMNS):
        post_event(m, f, c.START, 0, m[f + c.RELEASE])


@inside
def set_alarm(m, f, time):
    """Set the timer of flow ``f`` to ``time``; an alarm that goes off early is set again."""
    m[f + c.DUE] = time
    if m[f + c.ALARM_AT] < 0 or time < m[f + c.ALARM_AT]:
        m[f + c.ALARM_AT] = time
        post_event(m, f, c.ALARM, 0, time)


@inside
def timeout(m, x, f):
    """Return the retransmission timeout, ps (RFC 6298, 2), doubled for every one in a row."""
    way = m[f + c.TRANSPORT]
    least, most = x[way + c.LEAST_TIMEOUT], x[way + c.MOST_TIMEOUT]
    found = x[f + c.SMOOTHED] + 4.0 * x[f + c.VARIATION]
    return int(min(max(found, least) * (1 << min(m[f + c.BACKOFF], 20)), most))


@inside
def measure(m, x, f, round_trip):
    """Update the smoothed round trip and its variation (RFC 6298, 2.2 and 2.3)."""
    if x[f + c.SMOOTHED] == 0.0:
        x[f + c.SMOOTHED] = round_trip
        x[f + c.VARIATION] = round_trip / 2
        return
    off = abs(x[f + c.SMOOTHED] - round_trip)
    x[f + c.VARIATION] = 0.75 * x[f + c.VARIATION] + 0.25 * off
    x[f + c.SMOOTHED] = 0.875 * x[f + c.SMOOTHED] + 0.125 * round_trip
