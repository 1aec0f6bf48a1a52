"""The hot loops of routing, compiled by numba when they are first called.

Imported on first use, because numba takes longer than most commands. What ``first``, ``links``, ``first_into``,
``into``, ``forwards`` and ``unit`` are says `foretrain.network.routing.route_search.Ways`. Integers are int64 in every
call: another type would compile a kernel a second time.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from foretrain.network.jit import allocating, allocating_entry, entry

SOURCE, TARGET, METRIC = 0, 1, 2
"""Columns of the links. The metric of a link that is down is 0."""
MASK = 0xFFFFFFFF
PORT, PROTOCOL = 4791, 17
"""RoCEv2 is UDP to this port."""
FAR = 2**60
BEGIN, END, KNOWN, NEXT = 0, 1, 2, 3
"""Rows of the slots: where a node's options begin and end in the pool, in which search, and which one is next."""
LOST = -1
"""The length of a path that does not exist."""


# Note [Masks]
# A hash is a uint32, held in an int64 and masked after every multiplication and addition. numba widens the product of
# two uint32 without a word, plain Python never wraps, and numpy warns when it does: three different paths from one
# source. Both multipliers are below 2**31, so that no product leaves an int64 either.
@entry
def mix(x):
    """Map a uint32 to a uint32, one to one; each bit depends on all (hash-prospector's two-round function)."""
    x = (x ^ (x >> 16)) & MASK
    x = (x * 0x21F0AAAD) & MASK
    x ^= x >> 15
    x = (x * 0x735A2D97) & MASK
    return x ^ (x >> 15)


@entry
def flow_hash(source, target, connection, seed):
    """Hash a flow's 5-tuple; the source port is 14 bits of the connection, as a RoCEv2 flow label gives them."""
    label = (connection ^ (connection >> 20)) & 0xFFFFF
    port = 0xC000 | ((label ^ (label >> 14)) & 0x3FFF)
    key = mix(seed ^ PROTOCOL)
    key = mix(key ^ (source & MASK))
    key = mix(key ^ (target & MASK))
    return mix(key ^ (port << 16) ^ PORT)


@allocating
def chosen(key, node, many, spread, polarised):
    """Return which of ``many`` links ``node`` sends a flow over: the first, or the one that its hash says."""
    if many == 1 or not spread:
        return 0
    if polarised:
        return key % many
    return mix(key ^ mix((node + 0x9E3779B9) & MASK)) % many


@allocating
def search(anchor, first, links, first_into, into, forwards, unit, distance, reached):
    """Find the distances to ``anchor`` of the nodes that forward: breadth first where each metric is 1, else
    Dijkstra's.

    ``distance`` is -1 where nothing was reached, before and after. Returns how many nodes ``reached`` lists.
    """
    distance[anchor] = 0
    reached[0] = anchor
    count = 1
    if unit:
        done = 0
        while done < count:
            node = reached[done]
            done += 1
            for at in range(first_into[node], first_into[node + 1]):
                near = links[into[at], SOURCE]
                if forwards[near] and distance[near] < 0:
                    distance[near] = distance[node] + 1
                    reached[count] = near
                    count += 1
        return count
    nodes = np.int64(len(distance))
    heap = [np.int64(anchor)]
    while len(heap) > 0:
        key = heappop(heap)
        node = key % nodes
        if key // nodes > distance[node]:
            continue
        for at in range(first_into[node], first_into[node + 1]):
            near = np.int64(links[into[at], SOURCE])
            length = distance[node] + links[into[at], METRIC]
            if forwards[near] and (distance[near] < 0 or length < distance[near]):
                if distance[near] < 0:
                    reached[count] = near
                    count += 1
                distance[near] = length
                heappush(heap, length * nodes + near)
    return count


# Note [From both ends]
# Where a destination hangs at several nodes (a GPU at NVSwitch and PCIe switch), no other shares its search, and one
# from each GPU through all servers would take ten times as long as everything else. Such a search is bounded by a
# ball around the source, which holds every node up to some radius: a node on a shortest path that is farther from the
# destination than the path's length less the radius is in the ball, so beyond that distance only the ball is searched.
# The path's length is endless until the search meets the ball, and never too short afterwards. Distances are exact on
# shortest paths and never too short elsewhere, so that the options on the way are those of a whole search.


@allocating
def ball_around(source, anchor, first, links, forwards, size, ahead, inside):
    """Find the distances ``ahead`` from ``source``, exact up to the radius at which ``size`` nodes are ``inside``.

    Returns how many ``inside`` lists, which may be farther than that, and the radius.
    """
    nodes = np.int64(len(ahead))
    ahead[source] = 0
    inside[0] = source
    count = np.int64(1)
    heap = [np.int64(source)]
    while len(heap) > 0:
        key = heappop(heap)
        node, length = key % nodes, key // nodes
        if count >= size:
            return count, length
        if length > ahead[node] or node == anchor:
            continue
        for link in range(first[node], first[node + 1]):
            near, further = np.int64(links[link, TARGET]), length + links[link, METRIC]
            if links[link, METRIC] == 0 or not (forwards[near] or near == anchor):
                continue
            if ahead[near] < 0 or further < ahead[near]:
                if ahead[near] < 0:
                    inside[count] = near
                    count += 1
                ahead[near] = further
                heappush(heap, further * nodes + near)
    return count, np.int64(FAR)


@allocating
def search_between(
    source, anchor, size, first, links, first_into, into, forwards, unit, distance, reached, ahead, inside
):
    """Search as `search`, but exactly on the shortest paths from ``source`` only; see Note [From both ends].

    ``ahead`` is -1 before and after; the ball has about ``size`` nodes.
    """
    inner, radius = ball_around(source, anchor, first, links, forwards, size, ahead, inside)
    nodes = np.int64(len(distance))
    distance[anchor] = 0
    reached[0] = anchor
    count = np.int64(1)
    best = ahead[anchor] if ahead[anchor] >= 0 else np.int64(FAR)
    heap = [np.int64(anchor)]
    while len(heap) > 0:
        key = heappop(heap)
        node, length = key % nodes, key // nodes
        if length > distance[node]:
            continue
        for at in range(first_into[node], first_into[node + 1]):
            near = np.int64(links[into[at], SOURCE])
            further = length + links[into[at], METRIC]
            if not forwards[near] or (distance[near] >= 0 and further >= distance[near]):
                continue
            if ahead[near] >= 0:
                best = min(best, ahead[near] + further)
            known = 0 <= ahead[near] <= radius
            if further + radius >= best and not (known and ahead[near] + further <= best):
                continue
            if distance[near] < 0:
                reached[count] = near
                count += 1
            distance[near] = further
            heappush(heap, further * nodes + near)
    ahead[inside[:inner]] = -1
    return count


@allocating
def few(flows, flow, pairs):
    """Return whether at most ``pairs`` flows, of which ``flow`` is the first, have the same anchor."""
    return flow + pairs >= len(flows) or flows[flow + pairs, 3] != flows[flow, 3]


@allocating
def options(node, first, links, distance, pool, start):
    """Write the links over which shortest paths leave ``node`` into ``pool`` from ``start``; return their end."""
    best = np.int64(FAR)
    end = start
    for link in range(first[node], first[node + 1]):
        near = links[link, TARGET]
        if links[link, METRIC] == 0 or distance[near] < 0:
            continue
        length = distance[near] + links[link, METRIC]
        if length < best:
            best = length
            end = start
        if length == best:
            pool[end] = link
            end += 1
    return end


@allocating
def last(target, links, first_into, into, pool):
    """Write the shortest links into a ``target`` that hangs at a single node; return how many there are."""
    best = np.int64(FAR)
    end = 0
    for at in range(first_into[target], first_into[target + 1]):
        metric = np.int64(links[into[at], METRIC])
        if metric < best:
            best = metric
            end = 0
        if metric == best:
            pool[end] = into[at]
            end += 1
    return end


@allocating
def put(hops, used, link):
    """Return ``hops`` with ``link`` in place ``used``, twice as long if that was full."""
    if used == len(hops):
        hops = np.concatenate((hops, np.empty_like(hops)))
    hops[used] = link
    return hops


@allocating
def look_up(node, turn, first, links, distance, pool, slots, filled):
    """Make sure that the pool has the options of ``node``, once per search; return where it is filled up to."""
    if slots[KNOWN, node] != turn:
        slots[KNOWN, node], slots[BEGIN, node] = turn, filled
        filled = options(node, first, links, distance, pool, filled)
        slots[END, node] = filled
    slots[NEXT, node] = slots[BEGIN, node]
    return filled


@allocating_entry
def hop_by_hop(flows, first, links, first_into, into, forwards, unit, ball, pairs, spread, polarised, seed):
    """Find paths on which each node chooses the next link by itself.

    Args:
        flows: (flows, 4): source, target, connection, and the anchor to search from; those of an anchor in succession.
        first, links, first_into, into, forwards, unit, ball, pairs: the graph, and how to search it.
        spread, polarised, seed: how a node chooses; see `chosen`.

    Returns:
        How many links each path has, `LOST` where there is none; the links; how many flows had a choice.
    """
    nodes = len(first) - 1
    distance, reached = np.full(nodes, -1, np.int64), np.empty(nodes, np.int32)
    slots, pool, finals = np.full((4, nodes), -1, np.int32), np.empty(len(links), np.int32), np.empty_like(into)
    lengths, hops = np.zeros(len(flows), np.int32), np.empty(4 * len(flows) + 16, np.int32)
    ahead, inside = np.full(nodes, -1, np.int64), np.empty(nodes, np.int32)
    graph = (first, links, first_into, into, forwards, unit)
    used = filled = touched = ties = turn = np.int64(0)
    anchor = searched = np.int64(-1)
    alone = False
    for flow in range(len(flows)):
        node, target, connection = np.int64(flows[flow, 0]), np.int64(flows[flow, 1]), np.int64(flows[flow, 2])
        if node == target:
            continue
        if flows[flow, 3] != anchor or (alone and node != searched):
            alone = few(flows, flow, pairs) if flows[flow, 3] != anchor else alone
            distance[reached[:touched]] = -1
            anchor, searched, filled, turn = np.int64(flows[flow, 3]), node, np.int64(0), turn + 1
            if alone:
                touched = search_between(node, anchor, ball, *graph, distance, reached, ahead, inside)
            else:
                touched = search(anchor, *graph, distance, reached)
        key = flow_hash(node, target, connection, seed)
        start, tie = used, False
        while node != anchor:
            filled = look_up(node, turn, first, links, distance, pool, slots, filled)
            many = np.int64(slots[END, node] - slots[BEGIN, node])
            if many == 0:
                break
            tie |= many > 1
            link = pool[slots[BEGIN, node] + chosen(key, node, many, spread, polarised)]
            hops = put(hops, used, link)
            used += 1
            node = np.int64(links[link, TARGET])
        if node != anchor:
            lengths[flow] = LOST
            continue
        if anchor != target:
            many = last(target, links, first_into, into, finals)
            tie |= many > 1
            hops = put(hops, used, finals[chosen(key, node, many, spread, polarised)])
            used += 1
        lengths[flow] = used - start
        ties += tie
    return lengths, hops[:used].copy(), ties


# Note [Least loaded]
# Of all shortest paths of a flow: one whose most loaded link is the least loaded, with the flow on it and in relation
# to its capacity; of those, one with the least sum; of those, the lowest links. Two passes over the directed acyclic
# graph of shortest paths find it exactly. One pass over pairs of (most, sum) would not: the part of a path with the
# lower maximum may have the larger sum, and a link elsewhere may make its maximum irrelevant.


@allocating
def descend(top, anchor, mark, turn, first, links, distance, pool, slots, filled, seen, stack, order, count):
    """Append the nodes on shortest paths from ``top`` to ``order``, each after those that follow it on a path.

    Depth first; ``seen`` is ``mark`` where it has been. Returns what the pool and the order are filled up to.
    """
    seen[anchor], seen[top] = mark, mark
    stack[0], depth = top, np.int64(1)
    filled = look_up(top, turn, first, links, distance, pool, slots, filled)
    while depth > 0:
        node = np.int64(stack[depth - 1])
        if slots[NEXT, node] == slots[END, node]:
            order[count] = node
            count, depth = count + 1, depth - 1
            continue
        near = np.int64(links[pool[slots[NEXT, node]], TARGET])
        slots[NEXT, node] += 1
        if seen[near] != mark:
            seen[near], stack[depth], depth = mark, near, depth + 1
            filled = look_up(near, turn, first, links, distance, pool, slots, filled)
    return filled, count


@allocating
def lightest(order, links, pool, size, capacity, load, cost, slots, work):
    """Find the next link of the lightest path from each node of ``order``, for row NEXT; see Note [Least loaded].

    Args:
        order: nodes from `descend`, the last of which is where the paths begin.
        cost: to work with, (links,).
        work: (2, nodes): the most loaded link from a node on, and the sum; both are 0 for the anchor.
    """
    for index in range(len(order)):
        node = order[index]
        work[0, node] = np.inf
        for at in range(slots[BEGIN, node], slots[END, node]):
            link = pool[at]
            cost[link] = (load[link] + size) / capacity[link]
            work[0, node] = min(work[0, node], max(cost[link], work[0, links[link, TARGET]]))
    limit = work[0, order[len(order) - 1]]
    for index in range(len(order)):
        node = order[index]
        work[1, node] = np.inf
        for at in range(slots[BEGIN, node], slots[END, node]):
            total = cost[pool[at]] + work[1, links[pool[at], TARGET]]
            if cost[pool[at]] <= limit and total < work[1, node]:
                work[1, node] = total
                slots[NEXT, node] = pool[at]


@allocating_entry
def least_loaded(flows, first, links, first_into, into, forwards, unit, ball, pairs, size, capacity, load):
    """Find paths one after the other, each over the least loaded links, and add them to ``load``.

    As `hop_by_hop`, with a ``size`` for each flow and ``capacity`` and ``load`` of each link; see Note [Least loaded].
    """
    nodes = len(first) - 1
    distance, reached = np.full(nodes, -1, np.int64), np.empty(nodes, np.int32)
    slots, pool, finals = np.full((4, nodes), -1, np.int32), np.empty(len(links), np.int32), np.empty_like(into)
    ahead, inside = np.full(nodes, -1, np.int64), np.empty(nodes, np.int32)
    # What is on the paths from a node is the same for all flows of a search: where the order lists it, and in which.
    spans, order = np.full((3, nodes), -1, np.int64), np.empty(nodes, np.int32)
    seen, stack = np.full(nodes, -1, np.int64), np.empty(nodes, np.int32)
    work, cost = np.zeros((2, nodes)), np.zeros(len(links))
    lengths, hops = np.zeros(len(flows), np.int32), np.empty(4 * len(flows) + 16, np.int32)
    graph = (first, links, first_into, into, forwards, unit)
    used = filled = listed = touched = ties = turn = np.int64(0)
    anchor = searched = np.int64(-1)
    alone = False
    for flow in range(len(flows)):
        node, target = np.int64(flows[flow, 0]), np.int64(flows[flow, 1])
        if node == target:
            continue
        if flows[flow, 3] != anchor or (alone and node != searched):
            alone = few(flows, flow, pairs) if flows[flow, 3] != anchor else alone
            distance[reached[:touched]] = -1
            anchor, searched, turn = np.int64(flows[flow, 3]), node, turn + 1
            filled, listed = np.int64(0), np.int64(0)
            if alone:
                touched = search_between(node, anchor, ball, *graph, distance, reached, ahead, inside)
            else:
                touched = search(anchor, *graph, distance, reached)
            work[:, anchor] = 0.0
        start, many = used, np.int64(1)
        while node != anchor:
            filled = look_up(node, turn, first, links, distance, pool, slots, filled)
            many = np.int64(slots[END, node] - slots[BEGIN, node])
            if many != 1:
                break
            hops = put(hops, used, pool[slots[BEGIN, node]])
            node = np.int64(links[pool[slots[BEGIN, node]], TARGET])
            used += 1
        if many == 0:
            lengths[flow] = LOST
            continue
        tie = many > 1
        if tie and spans[2, node] != turn:
            if len(order) < listed + nodes:
                order = np.concatenate((order, np.empty(len(order) + nodes, np.int32)))
            spans[0, node], spans[2, node] = listed, turn
            filled, listed = descend(
                node,
                anchor,
                turn * nodes + node,
                turn,
                first,
                links,
                distance,
                pool,
                slots,
                filled,
                seen,
                stack,
                order,
                listed,
            )
            spans[1, node] = listed
        if tie:
            part = order[spans[0, node] : spans[1, node]]
            lightest(part, links, pool, size[flow], capacity, load, cost, slots, work)
        while node != anchor:
            hops = put(hops, used, slots[NEXT, node])
            node = np.int64(links[slots[NEXT, node], TARGET])
            used += 1
        if anchor != target:
            many = last(target, links, first_into, into, finals)
            tie |= many > 1
            best = finals[0]
            for at in range(1, many):
                if (load[finals[at]] + size[flow]) / capacity[finals[at]] < (load[best] + size[flow]) / capacity[best]:
                    best = finals[at]
            hops = put(hops, used, best)
            used += 1
        for at in range(start, used):
            load[hops[at]] += size[flow]
        lengths[flow] = used - start
        ties += tie
    return lengths, hops[:used].copy(), ties
