"""The fluid simulator's hot loop: events, and max-min fair rates after each batch of them.

Rates are exact. A *level* is a flow's rate per weight. The certificate of max-min fairness is that every flow has a
saturated link on which no flow of its class has a higher level: its bottleneck. Classes are strict: a class shares what
the classes before it leave.
"""

# Note [Local refill]
# After a batch of events most flows keep their rate. `refill` recomputes the flows that came, and those whose
# bottleneck lost or gained a flow or changed its capacity; all others stay and only take room away. Then it looks at
# every link these flows cross for a flow that stayed and whose certificate broke:
#   - its bottleneck is that link, and the link is no longer saturated, or someone there has a higher level now;
#   - the link is saturated, a recomputed flow was frozen there, and this flow has a higher level: it must yield, even
#     if that link is its own bottleneck.
# Those join, and all is computed again, until nobody joins. What results satisfies every certificate, hence is *the*
# max-min fair allocation, which is unique.

# Note [Enlisting]
# Nearly all that would join afterwards are found on the way, where nothing needs to be computed again. Filling goes
# from low levels to high ones, so a flow can still join while its level is above the one that filling has reached. When
# a link is full at a level, those that stayed on it above that level have to yield (`enlist`). When a flow is frozen
# below what it had, its other links have room, and those they held, at its old level or above, may have it. The room
# that such a flow brings along raises levels only, so that nothing that is frozen was frozen too early.

# Note [Lazy levels]
# The level at which a link is full only rises while others freeze flows. So a heap of links keyed by levels that may be
# too low is enough: the top is recomputed when it comes up, and goes back if it was too low. Of the links that a flow
# shares with no other chosen one only the tightest can bind; the others are not queued until somebody comes
# (`queue_path`). A link may be queued more than once; that it has nobody left to freeze makes the others harmless.

# Note [Collapsed rings]
# A ring in lock step whose links nobody else uses follows a recurrence, x_i(s) = c_i + max(x_i(s-1), x_{i-1}(s-1)),
# with x_i(s) the end of step s of member i and c_i what a step takes it alone. Instead of two events a step the ring
# then costs one event a member. The moment something else comes to one of its links, or the link changes, `expand` runs
# the recurrence up to now and hands the members back to the event loop as they stand. So it never approximates.
# Nobody but its successor may follow a member step by step, since its steps are not made one by one.

from __future__ import annotations

import numpy as np

from foretrain.network.fluid import state as c
from foretrain.network.fluid.heap import lift, put, settle, take
from foretrain.network.jit import entry, inlined, inside

EPSILON = 1e-11
"""Relative difference below which two levels, or a link's load and its capacity, count as equal."""
STARVED = 1e-12
"""Part of a link's capacity below which what classes share is nothing."""
UNCHANGED = 1e-14
"""Relative difference below which a recomputed rate is the old one: rounding, not worth moving an event for."""
SIMULTANEOUS = 1e-14
"""Relative difference of times below which two events are one instant: rounding of what is equal in theory."""


@inlined
def mark(s, link):
    """Note that the flows of ``link`` need a look at the next refill."""
    n = s.counter[c.DIRTY]
    if s.link[link, c.DIRTY_TICK] != s.counter[c.REFILLS]:
        s.link[link, c.DIRTY_TICK] = s.counter[c.REFILLS]
        s.dirty[n] = link
        s.counter[c.DIRTY] = n + 1


@inside
def carry(s, link, time):
    """Add what ``link`` has carried since the last call to the bins of its utilisation."""
    bins = s.carried.shape[1]
    while time > s.time[c.BIN] * bins:
        # Time has outgrown the bins: join them in pairs.
        for one in range(s.carried.shape[0]):
            for b in range(bins // 2):
                s.carried[one, b] = s.carried[one, 2 * b] + s.carried[one, 2 * b + 1]
            for b in range(bins // 2, bins):
                s.carried[one, b] = 0.0
        s.time[c.BIN] *= 2
    rate = 0.0
    for p in range(s.share.shape[1] - c.USED):
        rate += s.share[link, c.USED + p]
    spread(s, link, s.share[link, c.USED_SINCE], time, rate)
    s.share[link, c.USED_SINCE] = time


@entry
def carry_all(s):
    """Bring the utilisation of all links up to now."""
    for link in range(len(s.link)):
        carry(s, link, s.time[c.CLOCK])


@inside
def spread(s, link, begin, end, rate):
    """Add ``rate`` · (``end`` − ``begin``) bytes to the bins they fall into."""
    if rate <= 0.0 or end <= begin:
        return
    width = s.time[c.BIN]
    last = s.carried.shape[1] - 1
    b = min(int(begin / width), last)
    while begin < end:
        stop = end if b == last else min(end, (b + 1) * width)
        s.carried[link, b] += rate * (stop - begin)
        begin = stop
        b += 1


@inlined
def set_rate(s, f, rate, time):
    """Account for what flow ``f`` has sent, give it ``rate``, and move its end in the queue."""
    p = s.flow[f, c.PRIORITY]
    s.fluid[f, c.LEFT] -= s.fluid[f, c.RATE] * (time - s.fluid[f, c.SINCE])
    s.fluid[f, c.SINCE] = time
    change = rate - s.fluid[f, c.RATE]
    s.fluid[f, c.RATE] = rate
    for h in range(s.flow[f, c.HOP_FIRST], s.flow[f, c.HOP_LAST]):
        link = s.hop[h, c.LINK]
        if s.carried.shape[0]:
            carry(s, link, time)
        s.share[link, c.USED + p] += change
    n = s.counter[c.QUEUED]
    if rate > 0.0:
        end = time + max(s.fluid[f, c.LEFT], 0.0) / rate
        s.counter[c.QUEUED] = put(s.key, s.order, s.place, n, f, end)
    else:
        s.counter[c.QUEUED] = take(s.key, s.order, s.place, n, f)


@inside
def seat(s, f, time):
    """Make flow ``f`` active, with a seat on each of its links. Collapsed rings there wait to be expanded."""
    s.flow[f, c.PHASE] = c.ACTIVE
    s.fluid[f, c.RATE] = 0.0
    s.fluid[f, c.SINCE] = time
    s.flow[f, c.BOTTLENECK] = -1
    for h in range(s.flow[f, c.HOP_FIRST], s.flow[f, c.HOP_LAST]):
        link = s.hop[h, c.LINK]
        where = s.link[link, c.SEATS] + s.link[link, c.DEGREE]
        s.link[link, c.DEGREE] += 1
        s.seat[where, c.FLOW] = f
        s.seat[where, c.HOP] = h
        s.hop[h, c.SEAT] = where
        mark(s, link)
        ring = s.link[link, c.TAKEN_BY]
        if ring >= 0 and not s.ring[ring, c.DISTURBED]:
            s.ring[ring, c.DISTURBED] = 1
            s.ring[s.counter[c.TO_EXPAND], c.EXPAND] = ring
            s.counter[c.TO_EXPAND] += 1
    s.new[s.counter[c.NEW]] = f
    s.counter[c.NEW] += 1


@inlined
def leave(s, f, time):
    """Remove flow ``f`` from its links."""
    p = s.flow[f, c.PRIORITY]
    for h in range(s.flow[f, c.HOP_FIRST], s.flow[f, c.HOP_LAST]):
        link = s.hop[h, c.LINK]
        if s.carried.shape[0]:
            carry(s, link, time)
        s.link[link, c.DEGREE] -= 1
        last = s.link[link, c.SEATS] + s.link[link, c.DEGREE]
        where = s.hop[h, c.SEAT]
        s.seat[where, c.FLOW] = s.seat[last, c.FLOW]
        s.seat[where, c.HOP] = s.seat[last, c.HOP]
        s.hop[s.seat[where, c.HOP], c.SEAT] = where
        s.share[link, c.USED + p] -= s.fluid[f, c.RATE]
        if s.link[link, c.DEGREE] == 0:
            # Exactly, so that rounding does not pile up; on a link that is never empty it is 2e-14 after 10⁷ events.
            for q in range(s.share.shape[1] - c.USED):
                s.share[link, c.USED + q] = 0.0
        mark(s, link)
    s.fluid[f, c.RATE] = 0.0
    held = s.flow[f, c.BOTTLENECK]
    if held >= 0:
        s.link[held, c.HELD] -= 1
        s.flow[f, c.BOTTLENECK] = -1


@inside
def may_start(s, f):
    """Return whether the next step of flow ``f`` waits for no other flow."""
    if s.flow[f, c.MISSING] > 0:
        return False
    step = s.flow[f, c.DONE]
    for d in range(s.flow[f, c.DEPENDENCY_FIRST], s.flow[f, c.DEPENDENCY_LAST]):
        other = s.dependency[d, c.FLOW]
        if s.flow[other, c.DONE] < min(s.flow[other, c.STEPS], step + s.dependency[d, c.LAG]):
            return False
    return True


@inlined
def sends(s, f):
    """Return whether flow ``f`` has bytes to send and links to send them over; else a step is its latency alone."""
    return s.flow[f, c.HOP_FIRST] < s.flow[f, c.HOP_LAST] and s.fluid[f, c.SIZE] > 0.0


@inside
def begin(s, f, time):
    """Begin the next step of flow ``f``: its latency runs."""
    s.flow[f, c.PHASE] = c.LATENT
    s.fluid[f, c.LEFT] = s.fluid[f, c.SIZE]
    when = max(time, s.fluid[f, c.RELEASE]) + s.fluid[f, c.LATENCY]
    s.counter[c.QUEUED] = put(s.key, s.order, s.place, s.counter[c.QUEUED], f, when)
    ring = s.flow[f, c.RING]
    if ring >= 0 and s.flow[f, c.DONE] == 0:
        s.ring[ring, c.READY] += 1
        if s.ring[ring, c.READY] == s.ring[ring + 1, c.FIRST] - s.ring[ring, c.FIRST]:
            s.ring_begin[ring] = max(time, s.fluid[f, c.RELEASE])
            s.ring[s.counter[c.TO_COLLAPSE], c.COLLAPSE] = ring
            s.counter[c.TO_COLLAPSE] += 1


@inlined
def end_step(s, f, time):
    """End a step of flow ``f`` and begin its dependents."""
    s.flow[f, c.DONE] += 1
    s.flow[f, c.PHASE] = c.IDLE
    whole = s.flow[f, c.DONE] == s.flow[f, c.STEPS]
    if whole:
        s.flow[f, c.PHASE] = c.OVER
        s.fluid[f, c.SINCE] = time
        s.counter[c.UNFINISHED] -= 1
        owner = s.flow[f, c.OWNER]
        s.program[owner, c.OPEN] -= 1
        if s.program[owner, c.OPEN] == 0:
            s.program[s.counter[c.COMPLETED], c.COMPLETE] = owner
            s.counter[c.COMPLETED] += 1
    elif may_start(s, f):
        begin(s, f, time)
    for d in range(s.flow[f, c.DEPENDENT_FIRST], s.flow[f, c.DEPENDENT_LAST]):
        dependent = s.dependent[d]
        if dependent < 0:
            dependent = -1 - dependent
            if not whole:
                continue
            s.flow[dependent, c.MISSING] -= 1
        if s.flow[dependent, c.PHASE] == c.IDLE and may_start(s, dependent):
            begin(s, dependent, time)


@inside
def step_time(s, f):
    """Return the time of a step of flow ``f`` alone on its links; infinite at rate 0."""
    rate = np.inf
    for h in range(s.flow[f, c.HOP_FIRST], s.flow[f, c.HOP_LAST]):
        rate = min(rate, s.share[s.hop[h, c.LINK], c.CAPACITY])
    return s.fluid[f, c.LATENCY] + s.fluid[f, c.SIZE] / rate


@entry
def collapse(s):
    """Let each ring that waits for it run as one entity if all its links are free. See Note [Collapsed rings]."""
    for a in range(s.counter[c.TO_COLLAPSE]):
        collapse_one(s, s.ring[a, c.COLLAPSE])
    s.counter[c.TO_COLLAPSE] = 0


@inlined
def collapse_one(s, ring):
    """Let ``ring`` run as one entity if all its links are free."""
    time = s.ring_begin[ring]
    first, last = s.ring[ring, c.FIRST], s.ring[ring + 1, c.FIRST]
    n = last - first
    free = True
    for m in range(first, last):
        f = s.member[m]
        if s.flow[f, c.PHASE] != c.LATENT or s.key[f] != time + s.fluid[f, c.LATENCY]:
            free = False
            break
        for h in range(s.flow[f, c.HOP_FIRST], s.flow[f, c.HOP_LAST]):
            link = s.hop[h, c.LINK]
            if s.link[link, c.DEGREE] or s.link[link, c.TAKEN_BY] >= 0 or s.share[link, c.CAPACITY] <= 0.0:
                free = False
            s.link[link, c.TAKEN_BY] = ring if free else s.link[link, c.TAKEN_BY]
        if not free:
            break
    if not free:
        for m in range(first, last):
            f = s.member[m]
            for h in range(s.flow[f, c.HOP_FIRST], s.flow[f, c.HOP_LAST]):
                if s.link[s.hop[h, c.LINK], c.TAKEN_BY] == ring:
                    s.link[s.hop[h, c.LINK], c.TAKEN_BY] = -1
        return
    for m in range(first, last):
        s.member_cost[m] = step_time(s, s.member[m])
    recurrence(s, ring, np.inf)
    for i in range(n):
        f = s.member[first + i]
        s.flow[f, c.PHASE] = c.COLLAPSED
        s.counter[c.QUEUED] = put(s.key, s.order, s.place, s.counter[c.QUEUED], f, time + s.scratch[0, i])


@inlined
def recurrence(s, ring, until):
    """Run a collapsed ring alone for at most ``until`` ps.

    Leaves in `State.scratch`, per member: when its last step that ended by then did so, how many steps those are, and
    when the next one begins by the recurrence, which may be later than ``until``.
    """
    first, last = s.ring[ring, c.FIRST], s.ring[ring + 1, c.FIRST]
    n = last - first
    steps = s.flow[s.member[first], c.STEPS]
    ends, done, starts, now, after = s.scratch[0], s.scratch[1], s.scratch[2], s.scratch[3], s.scratch[4]
    cost = s.member_cost[first:last]
    alike = True
    for i in range(n):
        alike = alike and cost[i] == cost[0]
        ends[i] = done[i] = starts[i] = now[i] = 0.0
    if until == np.inf:
        # The common case, without the bookkeeping: where all members are alike, a product.
        for _ in range(1 if alike else steps):
            after[0] = cost[0] + max(now[0], now[n - 1])
            for i in range(1, n):
                after[i] = cost[i] + max(now[i], now[i - 1])
            now, after = after, now
        for i in range(n):
            ends[i] = steps * cost[0] if alike else now[i]
            done[i] = steps
        return
    for step in range(steps):
        after[0] = cost[0] + max(now[0], now[n - 1])
        for i in range(1, n):
            after[i] = cost[i] + max(now[i], now[i - 1])
        under_way = False
        for i in range(n):
            if after[i] <= until:
                ends[i] = after[i]
                done[i] = step + 1
                under_way = True
            elif done[i] == step:
                starts[i] = after[i] - cost[i]
                under_way = True
        now, after = after, now
        if not under_way:
            break


@entry
def expand(s):
    """Return the members of each ring that waits for it to the event loop, in their present state."""
    for a in range(s.counter[c.TO_EXPAND]):
        expand_one(s, s.ring[a, c.EXPAND], s.time[c.CLOCK])
    s.counter[c.TO_EXPAND] = 0


@inlined
def expand_one(s, ring, time):
    """Return the members of ``ring`` to the event loop, in their state at ``time``."""
    s.ring[ring, c.DISTURBED] = 0
    first, last = s.ring[ring, c.FIRST], s.ring[ring + 1, c.FIRST]
    begun = s.ring_begin[ring]
    recurrence(s, ring, time - begun)
    ends, done, starts = s.scratch[0], s.scratch[1], s.scratch[2]
    for m in range(first, last):
        f = s.member[m]
        for h in range(s.flow[f, c.HOP_FIRST], s.flow[f, c.HOP_LAST]):
            if s.link[s.hop[h, c.LINK], c.TAKEN_BY] == ring:
                s.link[s.hop[h, c.LINK], c.TAKEN_BY] = -1
    # First who is how far, then who may start: a member's dependency is its predecessor's count.
    for m in range(first, last):
        f = s.member[m]
        if s.flow[f, c.PHASE] == c.COLLAPSED:
            i = m - first
            s.flow[f, c.DONE] = min(int(done[i]), s.flow[f, c.STEPS] - 1)
            s.flow[f, c.PHASE] = c.IDLE
            s.counter[c.QUEUED] = take(s.key, s.order, s.place, s.counter[c.QUEUED], f)
            if s.carried.shape[0]:
                account(s, f, begun, time, s.flow[f, c.DONE] * s.fluid[f, c.SIZE])
    for m in range(first, last):
        f = s.member[m]
        i = m - first
        if s.flow[f, c.PHASE] != c.IDLE or not may_start(s, f):
            continue
        start = begun + (starts[i] if done[i] == s.flow[f, c.DONE] else ends[i] - s.member_cost[m])
        flowing = time - start - s.fluid[f, c.LATENCY]
        s.fluid[f, c.LEFT] = s.fluid[f, c.SIZE]
        if flowing < 0.0 or not sends(s, f):
            s.flow[f, c.PHASE] = c.LATENT
            when = max(time, start + s.fluid[f, c.LATENCY])
            s.counter[c.QUEUED] = put(s.key, s.order, s.place, s.counter[c.QUEUED], f, when)
        else:
            s.fluid[f, c.LEFT] *= 1.0 - min(1.0, flowing / (s.member_cost[m] - s.fluid[f, c.LATENCY]))
            if s.carried.shape[0]:
                account(s, f, time - flowing, time, s.fluid[f, c.SIZE] - s.fluid[f, c.LEFT])
            seat(s, f, time)


@inside
def account(s, f, begin_, end, bytes_):
    """Spread ``bytes_`` of a collapsed flow evenly over the time from ``begin_`` to ``end``."""
    if end <= begin_:
        return
    for h in range(s.flow[f, c.HOP_FIRST], s.flow[f, c.HOP_LAST]):
        link = s.hop[h, c.LINK]
        carry(s, link, end)
        spread(s, link, begin_, end, bytes_ / (end - begin_))


@inside
def level_on(s, link):
    """Return the level at which the flows of ``link`` that are not frozen share what is left.

    What is left by rounding alone is nothing: flows that classes before theirs starve, or a link that is down, would
    creep along on it for ever, and nobody would be told.
    """
    room, capacity = s.share[link, c.ROOM_LEFT], s.share[link, c.CAPACITY]
    return room / s.share[link, c.WEIGHTS] if capacity > 0.0 and room > STARVED * capacity else 0.0


@inside
def waterfill(s, n, p, tick):
    """Find max-min fair levels of the ``n`` chosen flows of class ``p`` in the room that all others leave.

    Fills ``NEW_RATE`` and ``BOTTLENECK``; returns how many are chosen then. See Notes [Lazy levels] and [Enlisting].
    """
    queue_links(s, n, p, tick)
    frozen = 0
    while frozen < n and s.counter[c.WAITING] > 0:
        link, queued = s.queue_link[0], s.queue_level[0]
        level = np.inf
        if s.link[link, c.UNFROZEN] > 0:
            level = level_on(s, link)
            if level > queued * (1.0 + 1e-15) + 1e-300:
                s.share[link, c.QUEUED_AT] = level
                settle(s.queue_level, s.queue_link, s.counter[c.WAITING], 0, link, level)
                continue
        last = s.counter[c.WAITING] - 1
        s.counter[c.WAITING] = last
        settle(s.queue_level, s.queue_link, last, 0, s.queue_link[last], s.queue_level[last])
        s.share[link, c.QUEUED_AT] = np.inf
        if level == np.inf:
            continue
        if s.link[link, c.CHOSEN] < s.link[link, c.DEGREE]:
            more = enlist(s, n, link, p, tick, level * (1.0 + EPSILON))
            if more > n:
                # `enlist` has queued this link again.
                n = more
                continue
        n = fill(s, n, link, p, tick, level)
        frozen += s.counter[c.FILLED]
    return n


@inside
def touch(s, f, p, tick):
    """Let chosen flow ``f`` take part: its links have its rate as room, and its weight."""
    s.fluid[f, c.NEW_RATE] = -1.0
    for h in range(s.flow[f, c.HOP_FIRST], s.flow[f, c.HOP_LAST]):
        link = s.hop[h, c.LINK]
        if s.link[link, c.TOUCHED_TICK] != tick:
            s.link[link, c.TOUCHED_TICK] = tick
            s.touched[s.counter[c.TOUCHED]] = link
            s.counter[c.TOUCHED] += 1
            s.link[link, c.CHOSEN] = 0
            s.link[link, c.UNFROZEN] = 0
            s.link[link, c.SOMEONE] = f
            room = s.share[link, c.CAPACITY]
            for q in range(p + 1):
                room -= s.share[link, c.USED + q]
            s.share[link, c.ROOM_LEFT] = room
            s.share[link, c.WEIGHTS] = 0.0
            s.share[link, c.LEVEL] = -1.0
            s.share[link, c.HIGHEST] = -1.0
            s.share[link, c.QUEUED_AT] = np.inf
        s.link[link, c.CHOSEN] += 1
        s.link[link, c.UNFROZEN] += 1
        s.share[link, c.WEIGHTS] += s.fluid[f, c.WEIGHT]
        s.share[link, c.ROOM_LEFT] += s.fluid[f, c.RATE]


@inside
def queue_links(s, n, p, tick):
    """Make the heap of the links that may bind: those that chosen flows share, and of each flow the tightest other."""
    s.counter[c.TOUCHED] = 0
    for a in range(n):
        touch(s, s.chosen[a], p, tick)
    queued = 0
    for a in range(s.counter[c.TOUCHED]):
        link = s.touched[a]
        if s.link[link, c.CHOSEN] > 1:
            s.queue_link[queued] = link
            queued += 1
    for a in range(n):
        f = s.chosen[a]
        tightest, least = -1, np.inf
        for h in range(s.flow[f, c.HOP_FIRST], s.flow[f, c.HOP_LAST]):
            link = s.hop[h, c.LINK]
            if s.link[link, c.CHOSEN] == 1 and (tightest < 0 or s.share[link, c.ROOM_LEFT] < least):
                tightest, least = link, s.share[link, c.ROOM_LEFT]
        if tightest >= 0:
            s.queue_link[queued] = tightest
            queued += 1
    for at in range(queued - 1, -1, -1):
        link = s.queue_link[at]
        level = level_on(s, link)
        s.share[link, c.QUEUED_AT] = level
        settle(s.queue_level, s.queue_link, queued, at, link, level)
    s.counter[c.WAITING] = queued


@inside
def enlist(s, n, link, p, tick, above):
    """Adds flows of class ``p`` that stayed on ``link`` to the chosen ones, in the midst of filling.

    Those of a level above ``above``, or where that is negative those for which it is the bottleneck. Returns how many
    are chosen then. See Note [Enlisting].
    """
    for where in range(s.link[link, c.SEATS], s.link[link, c.SEATS] + s.link[link, c.DEGREE]):
        g = s.seat[where, c.FLOW]
        if s.flow[g, c.CHOSEN_TICK] == tick or s.flow[g, c.PRIORITY] != p:
            continue
        if s.flow[g, c.BOTTLENECK] != link if above < 0.0 else s.fluid[g, c.RATE] <= above * s.fluid[g, c.WEIGHT]:
            continue
        s.flow[g, c.CHOSEN_TICK] = tick
        s.chosen[n] = g
        n += 1
        touch(s, g, p, tick)
        queue_path(s, g)
        for h in range(s.flow[g, c.HOP_FIRST], s.flow[g, c.HOP_LAST]):
            other = s.hop[h, c.LINK]
            if s.link[other, c.CHOSEN] == 2:
                # Whoever was alone here, and for whom this link alone was queued, may now be bound elsewhere first.
                queue_path(s, s.link[other, c.SOMEONE])
    return n


@inside
def queue_path(s, f):
    """Queue the links of chosen flow ``f`` that are not, or later than they should be."""
    for h in range(s.flow[f, c.HOP_FIRST], s.flow[f, c.HOP_LAST]):
        link = s.hop[h, c.LINK]
        if s.link[link, c.UNFROZEN] > 0:
            level = level_on(s, link)
            if level < s.share[link, c.QUEUED_AT] * (1.0 - 1e-12):  # Not for rounding: the queue has its bounds.
                s.share[link, c.QUEUED_AT] = level
                lift(s.queue_level, s.queue_link, s.counter[c.WAITING], link, level)
                s.counter[c.WAITING] += 1


@inlined
def fill(s, n, link, p, tick, level):
    """Freeze the chosen flows on ``link``, which is full at ``level``; count them in ``FILLED``.

    Where one gets less than it had, those held by its other links may get more: they are enlisted. Returns how many are
    chosen then.
    """
    s.share[link, c.LEVEL] = level
    s.counter[c.FILLED] = 0
    alone = s.link[link, c.CHOSEN] == 1
    first = s.link[link, c.SEATS]
    for where in range(first, first + (1 if alone else s.link[link, c.DEGREE])):
        f = s.link[link, c.SOMEONE] if alone else s.seat[where, c.FLOW]
        if s.flow[f, c.CHOSEN_TICK] != tick or s.fluid[f, c.NEW_RATE] >= 0.0:
            continue
        s.counter[c.FILLED] += 1
        freeze(s, f, link, level)
        if s.fluid[f, c.NEW_RATE] >= s.fluid[f, c.RATE] * (1.0 - EPSILON):
            continue
        for h in range(s.flow[f, c.HOP_FIRST], s.flow[f, c.HOP_LAST]):
            other = s.hop[h, c.LINK]
            if s.link[other, c.HELD] > 0 and s.link[other, c.ROUSED_TICK] != tick:
                s.link[other, c.ROUSED_TICK] = tick
                if s.link[other, c.CHOSEN] == s.link[other, c.DEGREE]:
                    continue
                n = enlist(s, n, other, p, tick, -1.0)
    return n


@inlined
def freeze(s, f, link, level):
    """Give chosen flow ``f`` its rate at ``level``, because ``link`` is full."""
    rate = level * s.fluid[f, c.WEIGHT]
    s.fluid[f, c.NEW_RATE] = rate
    before = s.flow[f, c.BOTTLENECK]
    if before >= 0:
        s.link[before, c.HELD] -= 1
    s.link[link, c.HELD] += 1
    s.flow[f, c.BOTTLENECK] = link
    s.counter[c.FROZEN] += s.flow[f, c.HOP_LAST] - s.flow[f, c.HOP_FIRST]
    for h in range(s.flow[f, c.HOP_FIRST], s.flow[f, c.HOP_LAST]):
        other = s.hop[h, c.LINK]
        s.share[other, c.ROOM_LEFT] -= rate
        s.link[other, c.UNFROZEN] -= 1
        s.share[other, c.WEIGHTS] -= s.fluid[f, c.WEIGHT]
        s.share[other, c.HIGHEST] = max(level, s.share[other, c.HIGHEST])


@inside
def recruit(s, n, p, tick):
    """Choose the flows of class ``p`` that stayed and whose certificate broke; return how many are chosen."""
    for a in range(s.counter[c.TOUCHED]):
        link = s.touched[a]
        if s.link[link, c.CHOSEN] == s.link[link, c.DEGREE]:
            continue
        saturated = s.share[link, c.ROOM_LEFT] <= s.share[link, c.CAPACITY] * EPSILON
        froze = saturated and s.share[link, c.LEVEL] >= 0.0
        if not froze and s.link[link, c.HELD] == 0:
            continue
        # With these a flow that is bottlenecked here is too low; with those any is too high.
        low = s.share[link, c.HIGHEST] * (1.0 - EPSILON) if saturated else np.inf
        high = s.share[link, c.LEVEL] * (1.0 + EPSILON) if froze else np.inf
        for where in range(s.link[link, c.SEATS], s.link[link, c.SEATS] + s.link[link, c.DEGREE]):
            g = s.seat[where, c.FLOW]
            if s.flow[g, c.PRIORITY] != p or s.flow[g, c.CHOSEN_TICK] == tick:
                continue
            level = s.fluid[g, c.RATE] / s.fluid[g, c.WEIGHT]
            if level > high or (level < low and s.flow[g, c.BOTTLENECK] == link):
                s.flow[g, c.CHOSEN_TICK] = tick
                s.fluid[g, c.NEW_RATE] = -2.0
                s.chosen[n] = g
                n += 1
    return n


@inside
def choose(s, p, tick):
    """Collect the flows of class ``p`` to start from: new ones, and those bottlenecked where something changed."""
    n = 0
    if s.counter[c.FULL]:
        for f in range(s.counter[c.FLOWS]):
            if s.flow[f, c.PHASE] == c.ACTIVE and s.flow[f, c.PRIORITY] == p:
                s.flow[f, c.CHOSEN_TICK] = tick
                s.chosen[n] = f
                n += 1
        return n
    for a in range(s.counter[c.NEW]):
        f = s.new[a]
        if s.flow[f, c.PHASE] == c.ACTIVE and s.flow[f, c.PRIORITY] == p and s.flow[f, c.CHOSEN_TICK] != tick:
            s.flow[f, c.CHOSEN_TICK] = tick
            s.chosen[n] = f
            n += 1
    for a in range(s.counter[c.DIRTY]):
        link = s.dirty[a]
        load = 0.0
        for q in range(p + 1):
            load += s.share[link, c.USED + q]
        overloaded = load > s.share[link, c.CAPACITY] * (1.0 + EPSILON)
        s.link[link, c.ROUSED_TICK] = tick
        if not overloaded and s.link[link, c.HELD] == 0:
            continue
        for where in range(s.link[link, c.SEATS], s.link[link, c.SEATS] + s.link[link, c.DEGREE]):
            f = s.seat[where, c.FLOW]
            if s.flow[f, c.PRIORITY] != p or s.flow[f, c.CHOSEN_TICK] == tick:
                continue
            if overloaded or s.flow[f, c.BOTTLENECK] == link:
                s.flow[f, c.CHOSEN_TICK] = tick
                s.chosen[n] = f
                n += 1
    return n


@inside
def refill(s, time):
    """Make all rates max-min fair again after a batch of changes. See Note [Local refill]."""
    classes = s.share.shape[1] - c.USED
    for p in range(classes):
        s.counter[c.TICK] += 1
        tick = s.counter[c.TICK]
        n = choose(s, p, tick)
        while n > 0:
            s.counter[c.ROUNDS] += 1
            n = waterfill(s, n, p, tick)
            more = recruit(s, n, p, tick)
            if more == n:
                break
            n = more
            s.counter[c.TICK] += 1
            tick = s.counter[c.TICK]
            for a in range(n):
                s.flow[s.chosen[a], c.CHOSEN_TICK] = tick
        s.counter[c.REFILLED] += n
        for a in range(n):
            f = s.chosen[a]
            if (
                s.fluid[f, c.RATE] > 0.0
                and abs(s.fluid[f, c.NEW_RATE] - s.fluid[f, c.RATE]) <= UNCHANGED * s.fluid[f, c.RATE]
            ):
                continue
            set_rate(s, f, s.fluid[f, c.NEW_RATE], time)
            if p + 1 < classes:
                for h in range(s.flow[f, c.HOP_FIRST], s.flow[f, c.HOP_LAST]):
                    mark(s, s.hop[h, c.LINK])
    s.counter[c.DIRTY] = 0
    s.counter[c.NEW] = 0
    s.counter[c.REFILLS] += 1


@entry
def advance(s, until, budget, stop):
    """Process everything up to and including ``until``, at most ``budget`` batches of events.

    Flows that were loaded since the last time begin first, where they wait for nobody; then rates are found after what
    was changed. It ends after the batch that completes what ``stop`` says: a program by its index, ``ANYTHING``, or
    ``NOTHING``. Returns ``THERE`` if it came to ``until``, ``RINGS`` where some wait for `expand` or `collapse`, before
    which it must not go on (those are rare, and this loop is compiled faster without them), or ``PAUSED``.
    """
    for f in range(s.counter[c.ADMITTED], s.counter[c.FLOWS]):
        if s.flow[f, c.PHASE] == c.IDLE and may_start(s, f):
            begin(s, f, s.time[c.CLOCK])
    s.counter[c.ADMITTED] = s.counter[c.FLOWS]
    while True:
        if s.counter[c.TO_EXPAND] > 0 or s.counter[c.TO_COLLAPSE] > 0:
            return c.RINGS
        if s.counter[c.DIRTY] > 0:
            refill(s, s.time[c.CLOCK])
        if (stop == c.ANYTHING and s.counter[c.COMPLETED] > 0) or (stop >= 0 and s.program[stop, c.OPEN] == 0):
            return c.PAUSED
        if s.counter[c.QUEUED] == 0 or s.key[s.order[0]] > until:
            break
        if budget <= 0:
            return c.PAUSED
        budget -= 1
        batch(s, s.key[s.order[0]])
    if s.time[c.CLOCK] < until < np.inf:
        s.time[c.CLOCK] = until
    return c.THERE


@inlined
def batch(s, time):
    """Process one instant: everything that happens at ``time``, or until a ring can be collapsed."""
    s.time[c.CLOCK] = max(s.time[c.CLOCK], time)
    s.counter[c.BATCHES] += 1
    horizon = time * (1.0 + SIMULTANEOUS)
    while s.counter[c.QUEUED] > 0 and s.key[s.order[0]] <= horizon and s.counter[c.TO_COLLAPSE] == 0:
        f = s.order[0]
        s.counter[c.QUEUED] = take(s.key, s.order, s.place, s.counter[c.QUEUED], f)
        s.counter[c.EVENTS] += 1
        if s.flow[f, c.PHASE] == c.LATENT and sends(s, f):
            seat(s, f, time)
            continue
        if s.flow[f, c.PHASE] == c.ACTIVE:
            leave(s, f, time)
        elif s.flow[f, c.PHASE] == c.COLLAPSED:
            finish_member(s, f, time)
        end_step(s, f, time)


@inlined
def finish_member(s, f, time):
    """Note that a member of a collapsed ring has made all its steps."""
    for h in range(s.flow[f, c.HOP_FIRST], s.flow[f, c.HOP_LAST]):
        s.link[s.hop[h, c.LINK], c.TAKEN_BY] = -1
    s.flow[f, c.DONE] = s.flow[f, c.STEPS] - 1
    if s.carried.shape[0]:
        account(s, f, s.ring_begin[s.flow[f, c.RING]], time, s.flow[f, c.STEPS] * s.fluid[f, c.SIZE])


@entry
def withdraw(s, first, last):
    """Cancel the flows ``first`` to ``last``, none of which is collapsed, now; `advance` then finds the new rates."""
    time = s.time[c.CLOCK]
    for f in range(first, last):
        if s.flow[f, c.PHASE] == c.ACTIVE:
            leave(s, f, time)
        if s.flow[f, c.PHASE] != c.OVER and s.flow[f, c.PHASE] != c.CANCELLED:
            s.counter[c.QUEUED] = take(s.key, s.order, s.place, s.counter[c.QUEUED], f)
            s.flow[f, c.PHASE] = c.CANCELLED
            s.counter[c.UNFINISHED] -= 1
            s.program[s.flow[f, c.OWNER], c.OPEN] -= 1


@entry
def rewire(s, links, capacities):
    """Give ``links``, which no collapsed ring has, new capacities, now; `advance` then finds the new rates."""
    for a in range(len(links)):
        link = links[a]
        s.share[link, c.CAPACITY] = capacities[a]
        mark(s, link)


@entry
def reseat(link, seat, hop, links, seats, rooms):
    """Move the lists of active flows of ``links`` to ``rooms`` seats each, from ``seats`` on."""
    for a in range(len(links)):
        one, to = links[a], seats[a]
        for n in range(link[one, c.DEGREE]):
            h = seat[link[one, c.SEATS] + n, c.HOP]
            seat[to + n, c.FLOW] = seat[link[one, c.SEATS] + n, c.FLOW]
            seat[to + n, c.HOP] = h
            hop[h, c.SEAT] = to + n
        link[one, c.SEATS] = to
        link[one, c.ROOM] = rooms[a]


@entry
def find_rings(s, first, last, rings):
    """Find the circles of flows in lock step among the flows ``first`` to ``last``.

    A member has one dependency, of lag 0, and one dependent; all members have equal steps, release and whole
    dependencies. Writes `State.member` and `State.ring` from ring ``rings`` on; returns how many rings there are then.
    """
    flow, member, ring = s.flow, s.member, s.ring
    for start in range(first, last):
        if flow[start, c.RING] != -1:
            continue
        f, n = start, 0
        base = ring[rings, c.FIRST]
        while True:
            flow[f, c.RING] = -2
            if not in_lock_step(s, f, start):
                break
            member[base + n] = f
            n += 1
            f = s.dependency[flow[f, c.DEPENDENCY_FIRST], c.FLOW]
            if flow[f, c.RING] != -1:
                break
        closed = n > 1 and f == start and same_waits(flow, member, base, n)
        if not closed:
            continue
        # Walked against the direction of the data; the recurrence wants predecessors first.
        for i in range(n // 2):
            a, b = member[base + i], member[base + n - 1 - i]
            member[base + i], member[base + n - 1 - i] = b, a
        for i in range(n):
            flow[member[base + i], c.RING] = rings
        rings += 1
        ring[rings, c.FIRST] = base + n
    for f in range(first, last):
        if flow[f, c.RING] == -2:
            flow[f, c.RING] = -1
    return rings


@inside
def in_lock_step(s, f, start):
    """Return whether flow ``f`` may be in one ring with flow ``start``."""
    dependency = s.flow[f, c.DEPENDENCY_FIRST]
    if s.flow[f, c.DEPENDENCY_LAST] - dependency != 1 or s.dependency[dependency, c.LAG] != 0:
        return False
    # Nobody else may follow its steps: while the ring is collapsed they are not made one by one.
    followers = 0
    for d in range(s.flow[f, c.DEPENDENT_FIRST], s.flow[f, c.DEPENDENT_LAST]):
        followers += s.dependent[d] >= 0
    same = s.flow[f, c.STEPS] == s.flow[start, c.STEPS] and s.fluid[f, c.RELEASE] == s.fluid[start, c.RELEASE]
    return followers == 1 and same


@inlined
def same_waits(flow, member, base, n):
    """Return whether the ``n`` members from ``base`` on wait for equally many others wholly.

    That they are the same ones is not needed: `collapse` looks whether all begin at one instant.
    """
    same = True
    for i in range(1, n):
        same = same and flow[member[base + i], c.MISSING] == flow[member[base], c.MISSING]
    return same


@entry
def move(s, flow, first, last):
    """Put ``flow``, which is not collapsed, on hops ``first`` to ``last``, now; what it has sent stays sent.

    `advance` then finds the new rates.
    """
    time = s.time[c.CLOCK]
    active = s.flow[flow, c.PHASE] == c.ACTIVE
    if active:
        s.fluid[flow, c.LEFT] -= s.fluid[flow, c.RATE] * (time - s.fluid[flow, c.SINCE])
        s.counter[c.QUEUED] = take(s.key, s.order, s.place, s.counter[c.QUEUED], flow)
        leave(s, flow, time)
    s.flow[flow, c.HOP_FIRST] = first
    s.flow[flow, c.HOP_LAST] = last
    if active and first == last:
        # Nothing is in its way any more: the step ends now.
        s.flow[flow, c.PHASE] = c.LATENT
        s.counter[c.QUEUED] = put(s.key, s.order, s.place, s.counter[c.QUEUED], flow, time)
    elif active:
        seat(s, flow, time)
