"""The fluid simulator's hot loop: events, and max-min fair rates after each batch of them.

Rates are exact. A *level* is a flow's rate per weight. The certificate of max-min fairness is that every flow has a
saturated link on which no flow of its class has a higher level: its bottleneck. Classes are strict: a class shares what
the classes before it leave.

Everything is in this one file because numba's cache does not notice changes in the files that a kernel calls into.
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

# Note [Lazy levels]
# The level at which a link is full only rises while others freeze flows. So a heap of links keyed by levels that may be
# too low is enough: the top is recomputed when it comes up, and goes back if it was too low.

# Note [Collapsed rings]
# A ring in lock step whose links nobody else uses follows a recurrence, x_i(s) = c_i + max(x_i(s-1), x_{i-1}(s-1)),
# with x_i(s) the end of step s of member i and c_i what a step takes it alone. Instead of two events a step the ring
# then costs one event a member. The moment something else comes to one of its links, or the link changes, `expand` runs
# the recurrence up to now and hands the members back to the event loop as they stand. So it never approximates.

from __future__ import annotations

import numpy as np

from foretrain.network.fluid import state as c
from foretrain.network.fluid.heap import put, sink, take
from foretrain.network.fluid.jit import entry, inlined, inside

EPSILON = 1e-11
"""Relative difference below which two levels, or a link's load and its capacity, count as equal."""
UNCHANGED = 1e-14
"""Relative difference below which a recomputed rate is the old one: rounding, not worth moving an event for."""
SIMULTANEOUS = 1e-14
"""Relative difference of times below which two events are one instant: rounding of what is equal in theory."""


@inlined
def mark(s, link):
    """Notes that the flows of ``link`` need a look at the next refill."""
    n = s.counter[c.DIRTY]
    if s.link[link, c.DIRTY_TICK] != s.counter[c.BATCHES]:
        s.link[link, c.DIRTY_TICK] = s.counter[c.BATCHES]
        s.dirty[n] = link
        s.counter[c.DIRTY] = n + 1


@inside
def carry(s, link, time):
    """Adds what ``link`` has carried since it was last asked to the bins of its utilisation."""
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
    for p in range(s.used.shape[0]):
        rate += s.used[p, link]
    spread(s, link, s.share[link, c.USED_SINCE], time, rate)
    s.share[link, c.USED_SINCE] = time


@entry
def carry_all(s):
    """Brings the utilisation of all links up to now."""
    for link in range(len(s.link)):
        carry(s, link, s.time[c.CLOCK])


@inside
def spread(s, link, begin, end, rate):
    """Adds ``rate`` · (``end`` − ``begin``) bytes to the bins they fall into."""
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
    """Settles what flow ``f`` has sent, gives it ``rate``, and moves its end in the queue."""
    p = s.flow[f, c.PRIORITY]
    s.fluid[f, c.LEFT] -= s.fluid[f, c.RATE] * (time - s.fluid[f, c.SINCE])
    s.fluid[f, c.SINCE] = time
    change = rate - s.fluid[f, c.RATE]
    s.fluid[f, c.RATE] = rate
    for h in range(s.flow[f, c.HOP_FIRST], s.flow[f, c.HOP_LAST]):
        link = s.hop[h, c.LINK]
        if s.carried.shape[0]:
            carry(s, link, time)
        s.used[p, link] += change
    n = s.counter[c.QUEUED]
    if rate > 0.0:
        end = time + max(s.fluid[f, c.LEFT], 0.0) / rate
        s.counter[c.QUEUED] = put(s.key, s.order, s.place, n, f, end)
    else:
        s.counter[c.QUEUED] = take(s.key, s.order, s.place, n, f)


@inside
def join(s, f, time):
    """Makes flow ``f`` active. Rings that were collapsed on its links no longer are."""
    for h in range(s.flow[f, c.HOP_FIRST], s.flow[f, c.HOP_LAST]):
        ring = s.link[s.hop[h, c.LINK], c.TAKEN_BY]
        if ring >= 0:
            expand(s, ring, time)
    seat(s, f, time)


@inside
def seat(s, f, time):
    """Gives active flow ``f`` a seat on each of its links; it waits for a rate."""
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
    s.new[s.counter[c.NEW]] = f
    s.counter[c.NEW] += 1


@inlined
def leave(s, f, time):
    """Takes flow ``f`` off its links."""
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
        s.used[p, link] -= s.fluid[f, c.RATE]
        if s.link[link, c.DEGREE] == 0:
            # Exactly, so that rounding does not pile up over a long simulation.
            for q in range(s.used.shape[0]):
                s.used[q, link] = 0.0
        mark(s, link)
    s.fluid[f, c.RATE] = 0.0


@inside
def may_start(s, f):
    """Whether the next step of flow ``f`` waits for nobody."""
    if s.flow[f, c.MISSING] > 0:
        return False
    step = s.flow[f, c.DONE]
    for d in range(s.flow[f, c.GATE_FIRST], s.flow[f, c.GATE_LAST]):
        other = s.gate[d, c.FLOW]
        if s.flow[other, c.DONE] < min(s.flow[other, c.STEPS], step + s.gate[d, c.LAG]):
            return False
    return True


@inside
def begin(s, f, time):
    """Begins the next step of flow ``f``: its latency runs."""
    s.flow[f, c.PHASE] = c.LATENT
    s.fluid[f, c.LEFT] = s.fluid[f, c.SIZE]
    when = max(time, s.fluid[f, c.RELEASE]) + s.fluid[f, c.LATENCY]
    s.counter[c.QUEUED] = put(s.key, s.order, s.place, s.counter[c.QUEUED], f, when)
    ring = s.flow[f, c.RING]
    if ring >= 0 and s.flow[f, c.DONE] == 0:
        s.ring[ring, c.READY] += 1
        if s.ring[ring, c.READY] == s.ring[ring + 1, c.FIRST] - s.ring[ring, c.FIRST]:
            collapse(s, ring, max(time, s.fluid[f, c.RELEASE]))


@inlined
def end_step(s, f, time):
    """Ends a step of flow ``f`` and begins what waited for it."""
    s.flow[f, c.DONE] += 1
    s.flow[f, c.PHASE] = c.IDLE
    whole = s.flow[f, c.DONE] == s.flow[f, c.STEPS]
    if whole:
        s.flow[f, c.PHASE] = c.OVER
        s.fluid[f, c.FINISH] = time
        s.counter[c.UNFINISHED] -= 1
        owner = s.flow[f, c.OWNER]
        s.program[owner, c.OPEN] -= 1
        if s.program[owner, c.OPEN] == 0:
            s.program[s.counter[c.COMPLETED], c.COMPLETE] = owner
            s.counter[c.COMPLETED] += 1
    elif may_start(s, f):
        begin(s, f, time)
    for d in range(s.flow[f, c.HEIR_FIRST], s.flow[f, c.HEIR_LAST]):
        heir = s.heir[d]
        if heir < 0:
            heir = -1 - heir
            if not whole:
                continue
            s.flow[heir, c.MISSING] -= 1
        if s.flow[heir, c.PHASE] == c.IDLE and may_start(s, heir):
            begin(s, heir, time)


@inside
def step_time(s, f):
    """What a step takes flow ``f`` when it has its links for itself, 0 rate being forever."""
    rate = np.inf
    for h in range(s.flow[f, c.HOP_FIRST], s.flow[f, c.HOP_LAST]):
        rate = min(rate, s.share[s.hop[h, c.LINK], c.CAPACITY])
    return s.fluid[f, c.LATENCY] + s.fluid[f, c.SIZE] / rate


@inside
def collapse(s, ring, time):
    """Lets a ring run as one entity if all its links are free. See Note [Collapsed rings]."""
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
    s.ring_begin[ring] = time
    for m in range(first, last):
        s.member_cost[m] = step_time(s, s.member[m])
    recurrence(s, ring, np.inf)
    for i in range(n):
        f = s.member[first + i]
        s.flow[f, c.PHASE] = c.COLLAPSED
        s.counter[c.QUEUED] = put(s.key, s.order, s.place, s.counter[c.QUEUED], f, time + s.scratch[0, i])


@inside
def recurrence(s, ring, until):
    """Runs a collapsed ring alone for at most ``until`` ps.

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


@inside
def expand(s, ring, time):
    """Hands the members of a collapsed ring back to the event loop as they stand at ``time``."""
    first, last = s.ring[ring, c.FIRST], s.ring[ring + 1, c.FIRST]
    begun = s.ring_begin[ring]
    recurrence(s, ring, time - begun)
    ends, done, starts = s.scratch[0], s.scratch[1], s.scratch[2]
    for m in range(first, last):
        f = s.member[m]
        for h in range(s.flow[f, c.HOP_FIRST], s.flow[f, c.HOP_LAST]):
            if s.link[s.hop[h, c.LINK], c.TAKEN_BY] == ring:
                s.link[s.hop[h, c.LINK], c.TAKEN_BY] = -1
    # First who is how far, then who may start: a member's gate is its predecessor's count.
    for m in range(first, last):
        f = s.member[m]
        if s.flow[f, c.PHASE] == c.COLLAPSED:
            i = m - first
            s.flow[f, c.DONE] = min(int(done[i]), s.flow[f, c.STEPS] - 1)
            s.flow[f, c.PHASE] = c.IDLE
            s.counter[c.QUEUED] = take(s.key, s.order, s.place, s.counter[c.QUEUED], f)
            if s.carried.shape[0]:
                account(s, f, begun, time)
    for m in range(first, last):
        f = s.member[m]
        i = m - first
        if s.flow[f, c.PHASE] != c.IDLE or not may_start(s, f):
            continue
        start = begun + (starts[i] if done[i] == s.flow[f, c.DONE] else ends[i] - s.member_cost[m])
        flowing = time - start - s.fluid[f, c.LATENCY]
        s.fluid[f, c.LEFT] = s.fluid[f, c.SIZE]
        if flowing < 0.0:
            s.flow[f, c.PHASE] = c.LATENT
            s.counter[c.QUEUED] = put(s.key, s.order, s.place, s.counter[c.QUEUED], f, start + s.fluid[f, c.LATENCY])
        else:
            s.fluid[f, c.LEFT] *= 1.0 - min(1.0, flowing / (s.member_cost[m] - s.fluid[f, c.LATENCY]))
            seat(s, f, time)


@inside
def account(s, f, begin_, end):
    """Utilisation of a collapsed flow: its bytes, spread evenly over the time it ran."""
    if end <= begin_:
        return
    for h in range(s.flow[f, c.HOP_FIRST], s.flow[f, c.HOP_LAST]):
        link = s.hop[h, c.LINK]
        carry(s, link, end)
        spread(s, link, begin_, end, s.flow[f, c.DONE] * s.fluid[f, c.SIZE] / (end - begin_))


@inside
def waterfill(s, n, p, tick):
    """Max-min fair levels of the ``n`` chosen flows of class ``p`` in the room that all others leave.

    Fills ``new_rate`` and ``bottleneck``; returns how many links these flows touch. See Note [Lazy levels].
    """
    links = 0
    for a in range(n):
        f = s.chosen[a]
        s.fluid[f, c.NEW_RATE] = -1.0
        for h in range(s.flow[f, c.HOP_FIRST], s.flow[f, c.HOP_LAST]):
            link = s.hop[h, c.LINK]
            if s.link[link, c.TOUCHED_TICK] != tick:
                s.link[link, c.TOUCHED_TICK] = tick
                s.touched[links] = link
                links += 1
                s.link[link, c.UNFROZEN] = 0
                s.share[link, c.WEIGHTS] = 0.0
                s.share[link, c.ROOM_LEFT] = 0.0
                s.share[link, c.LEVEL] = -1.0
            s.link[link, c.UNFROZEN] += 1
            s.share[link, c.WEIGHTS] += s.fluid[f, c.WEIGHT]
            s.share[link, c.ROOM_LEFT] += s.fluid[f, c.RATE]
    heap = 0
    for a in range(links):
        link = s.touched[a]
        room = s.share[link, c.CAPACITY]
        for q in range(p):
            room -= s.used[q, link]
        if s.link[link, c.UNFROZEN] < s.link[link, c.DEGREE]:
            # Some flow stays: there is room for what the chosen ones have now and what nobody uses.
            room += s.share[link, c.ROOM_LEFT] - s.used[p, link]
        s.share[link, c.ROOM_LEFT] = room
        s.link_key[link] = max(room, 0.0) / s.share[link, c.WEIGHTS]
        s.link_order[heap] = link
        s.link_place[link] = heap
        heap += 1
    for at in range((heap - 2) >> 2, -1, -1):
        sink(s.link_key, s.link_order, s.link_place, heap, at)
    left = n
    while left > 0 and heap > 0:
        link = s.link_order[0]
        if s.link[link, c.UNFROZEN] == 0:
            heap = take(s.link_key, s.link_order, s.link_place, heap, link)
            continue
        level = max(s.share[link, c.ROOM_LEFT], 0.0) / s.share[link, c.WEIGHTS]
        if level > s.link_key[link] * (1.0 + 1e-15) + 1e-300:
            s.link_key[link] = level
            sink(s.link_key, s.link_order, s.link_place, heap, 0)
            continue
        heap = take(s.link_key, s.link_order, s.link_place, heap, link)
        s.share[link, c.LEVEL] = level
        for where in range(s.link[link, c.SEATS], s.link[link, c.SEATS] + s.link[link, c.DEGREE]):
            f = s.seat[where, c.FLOW]
            if s.flow[f, c.CHOSEN_TICK] != tick or s.fluid[f, c.NEW_RATE] >= 0.0:
                continue
            rate = level * s.fluid[f, c.WEIGHT]
            s.fluid[f, c.NEW_RATE] = rate
            s.flow[f, c.BOTTLENECK] = link
            left -= 1
            for h in range(s.flow[f, c.HOP_FIRST], s.flow[f, c.HOP_LAST]):
                other = s.hop[h, c.LINK]
                s.share[other, c.ROOM_LEFT] -= rate
                s.link[other, c.UNFROZEN] -= 1
                s.share[other, c.WEIGHTS] -= s.fluid[f, c.WEIGHT]
                s.counter[c.FROZEN] += 1
    for a in range(links):
        s.link_place[s.touched[a]] = -1
    return links


@inside
def recruit(s, n, links, p, tick):
    """Adds the flows of class ``p`` that stayed and whose certificate broke to the chosen ones. Returns how many."""
    for a in range(links):
        link = s.touched[a]
        first, last = s.link[link, c.SEATS], s.link[link, c.SEATS] + s.link[link, c.DEGREE]
        highest = -1.0
        stayed = False
        for where in range(first, last):
            f = s.seat[where, c.FLOW]
            if s.flow[f, c.CHOSEN_TICK] == tick and s.fluid[f, c.NEW_RATE] >= 0.0:
                highest = max(highest, s.fluid[f, c.NEW_RATE] / s.fluid[f, c.WEIGHT])
            elif s.flow[f, c.PRIORITY] == p:
                stayed = True
        if not stayed:
            continue
        saturated = s.share[link, c.ROOM_LEFT] <= s.share[link, c.CAPACITY] * EPSILON
        for where in range(first, last):
            g = s.seat[where, c.FLOW]
            if s.flow[g, c.PRIORITY] != p or s.flow[g, c.CHOSEN_TICK] == tick:
                continue
            level = s.fluid[g, c.RATE] / s.fluid[g, c.WEIGHT]
            lower = s.flow[g, c.BOTTLENECK] == link and (not saturated or level < highest * (1.0 - EPSILON))
            higher = saturated and s.share[link, c.LEVEL] >= 0.0 and level > s.share[link, c.LEVEL] * (1.0 + EPSILON)
            if lower or higher:
                s.flow[g, c.CHOSEN_TICK] = tick
                s.fluid[g, c.NEW_RATE] = -2.0
                s.chosen[n] = g
                n += 1
    return n


@inside
def choose(s, p, tick):
    """Collects the flows of class ``p`` to start from: new ones, and those bottlenecked where something changed."""
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
            load += s.used[q, link]
        overloaded = load > s.share[link, c.CAPACITY] * (1.0 + EPSILON)
        for where in range(s.link[link, c.SEATS], s.link[link, c.SEATS] + s.link[link, c.DEGREE]):
            f = s.seat[where, c.FLOW]
            if s.flow[f, c.PRIORITY] != p or s.flow[f, c.CHOSEN_TICK] == tick:
                continue
            if overloaded or s.flow[f, c.BOTTLENECK] == link:
                s.flow[f, c.CHOSEN_TICK] = tick
                s.chosen[n] = f
                n += 1
    return n


@inlined
def refill(s, time):
    """Makes all rates max-min fair again after a batch of changes. See Note [Local refill]."""
    classes = s.used.shape[0]
    for p in range(classes):
        s.counter[c.TICK] += 1
        tick = s.counter[c.TICK]
        n = choose(s, p, tick)
        while n > 0:
            s.counter[c.ROUNDS] += 1
            links = waterfill(s, n, p, tick)
            more = recruit(s, n, links, p, tick)
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


@entry
def advance(s, until, budget, stop):
    """Lets everything happen up to and including ``until``, at most ``budget`` batches of events.

    Flows that were loaded since the last time begin first, where they wait for nobody. With ``stop`` it ends after the
    first batch that completes a program. Returns whether it came to ``until``.
    """
    for f in range(s.counter[c.ADMITTED], s.counter[c.FLOWS]):
        if s.flow[f, c.PHASE] == c.IDLE and may_start(s, f):
            begin(s, f, s.time[c.CLOCK])
    s.counter[c.ADMITTED] = s.counter[c.FLOWS]
    while s.counter[c.QUEUED] > 0:
        time = s.key[s.order[0]]
        if time > until:
            break
        if budget <= 0 or (stop and s.counter[c.COMPLETED] > 0):
            return False
        budget -= 1
        batch(s, time)
    if stop and s.counter[c.COMPLETED] > 0:
        return False
    if s.time[c.CLOCK] < until < np.inf:
        s.time[c.CLOCK] = until
    return True


@inlined
def batch(s, time):
    """One instant: everything that happens at ``time``, then new rates."""
    s.time[c.CLOCK] = max(s.time[c.CLOCK], time)
    s.counter[c.BATCHES] += 1
    horizon = time * (1.0 + SIMULTANEOUS)
    while s.counter[c.QUEUED] > 0 and s.key[s.order[0]] <= horizon:
        f = s.order[0]
        s.counter[c.QUEUED] = take(s.key, s.order, s.place, s.counter[c.QUEUED], f)
        s.counter[c.EVENTS] += 1
        if s.flow[f, c.PHASE] == c.LATENT:
            if s.flow[f, c.HOP_FIRST] == s.flow[f, c.HOP_LAST] or s.fluid[f, c.SIZE] <= 0.0:
                end_step(s, f, time)
            else:
                join(s, f, time)
        elif s.flow[f, c.PHASE] == c.ACTIVE:
            leave(s, f, time)
            end_step(s, f, time)
        elif s.flow[f, c.PHASE] == c.COLLAPSED:
            finish_member(s, f, time)
    refill(s, time)


@inlined
def finish_member(s, f, time):
    """A member of a collapsed ring has made all its steps."""
    for h in range(s.flow[f, c.HOP_FIRST], s.flow[f, c.HOP_LAST]):
        s.link[s.hop[h, c.LINK], c.TAKEN_BY] = -1
    s.flow[f, c.DONE] = s.flow[f, c.STEPS]
    if s.carried.shape[0]:
        account(s, f, s.ring_begin[s.flow[f, c.RING]], time)
    s.flow[f, c.DONE] -= 1
    end_step(s, f, time)


@entry
def withdraw(s, first, last):
    """Cancels the flows ``first`` to ``last``, whatever they are doing, now."""
    time = s.time[c.CLOCK]
    s.counter[c.BATCHES] += 1
    for f in range(first, last):
        if s.flow[f, c.PHASE] == c.COLLAPSED:
            expand(s, s.flow[f, c.RING], time)
        if s.flow[f, c.PHASE] == c.ACTIVE:
            leave(s, f, time)
        if s.flow[f, c.PHASE] != c.OVER and s.flow[f, c.PHASE] != c.CANCELLED:
            s.counter[c.QUEUED] = take(s.key, s.order, s.place, s.counter[c.QUEUED], f)
            s.flow[f, c.PHASE] = c.CANCELLED
            s.counter[c.UNFINISHED] -= 1
            s.program[s.flow[f, c.OWNER], c.OPEN] -= 1
    refill(s, time)


@entry
def rewire(s, links, capacities):
    """Gives ``links`` new capacities, now."""
    time = s.time[c.CLOCK]
    s.counter[c.BATCHES] += 1
    for a in range(len(links)):
        link = links[a]
        if s.link[link, c.TAKEN_BY] >= 0:
            expand(s, s.link[link, c.TAKEN_BY], time)
        s.share[link, c.CAPACITY] = capacities[a]
        mark(s, link)
    refill(s, time)


@entry
def reseat(link, seat, hop, links, seats, rooms):
    """Moves the lists of active flows of ``links`` to ``rooms`` seats each, from ``seats`` on."""
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
def find_rings(flow, fluid, gate, ring, member, first, last, rings):
    """Finds rings in lock step among the flows ``first`` to ``last``: who waits for whom comes back to where it began.

    A member has one gate, of lag 0; all members have equal steps, release and whole dependencies. Writes `State.member`
    and `State.ring_first` from ring ``rings`` on, and returns how many rings there are then.
    """
    for start in range(first, last):
        if flow[start, c.RING] != -1:
            continue
        f, n = start, 0
        base = ring[rings, c.FIRST]
        while True:
            flow[f, c.RING] = -2
            lonely = flow[f, c.GATE_LAST] - flow[f, c.GATE_FIRST] != 1 or gate[flow[f, c.GATE_FIRST], c.LAG] != 0
            if lonely or flow[f, c.STEPS] != flow[start, c.STEPS] or fluid[f, c.RELEASE] != fluid[start, c.RELEASE]:
                break
            member[base + n] = f
            n += 1
            f = gate[flow[f, c.GATE_FIRST], c.FLOW]
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


@inlined
def same_waits(flow, member, base, n):
    """Whether the ``n`` members from ``base`` on wait for equally many others wholly.

    That they are the same ones is not needed: `collapse` looks whether all begin at one instant.
    """
    same = True
    for i in range(1, n):
        same = same and flow[member[base + i], c.MISSING] == flow[member[base], c.MISSING]
    return same


@entry
def move(s, flow, first, last):
    """Puts ``flow`` on the path of hops ``first`` to ``last``, now; what it has sent stays sent."""
    time = s.time[c.CLOCK]
    s.counter[c.BATCHES] += 1
    if s.flow[flow, c.PHASE] == c.COLLAPSED:
        expand(s, s.flow[flow, c.RING], time)
    active = s.flow[flow, c.PHASE] == c.ACTIVE
    if active:
        s.fluid[flow, c.LEFT] -= s.fluid[flow, c.RATE] * (time - s.fluid[flow, c.SINCE])
        s.counter[c.QUEUED] = take(s.key, s.order, s.place, s.counter[c.QUEUED], flow)
        leave(s, flow, time)
    s.flow[flow, c.HOP_FIRST] = first
    s.flow[flow, c.HOP_LAST] = last
    if active:
        join(s, flow, time)
    refill(s, time)
