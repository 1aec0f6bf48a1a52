"""An indexed 4-ary heap in three arrays, for kernels: smallest key first, keys of members may change.

``keys[i]`` is item i's key, ``order[:n]`` the heap of items, ``place[i]`` where item i stands in it, -1 outside.
"""

from __future__ import annotations

from foretrain.network.jit import inside


@inside
def rise(keys, order, place, at):
    """Move the item at position ``at`` towards the top."""
    item = order[at]
    key = keys[item]
    while at > 0:
        above = (at - 1) >> 2
        if keys[order[above]] <= key:
            break
        order[at] = order[above]
        place[order[at]] = at
        at = above
    order[at] = item
    place[item] = at


@inside
def sink(keys, order, place, n, at):
    """Move the item at position ``at`` away from the top."""
    item = order[at]
    key = keys[item]
    while True:
        child = 4 * at + 1
        if child >= n:
            break
        least = child
        for other in range(child + 1, min(child + 4, n)):
            if keys[order[other]] < keys[order[least]]:
                least = other
        if keys[order[least]] >= key:
            break
        order[at] = order[least]
        place[order[at]] = at
        at = least
    order[at] = item
    place[item] = at


@inside
def put(keys, order, place, n, item, key):
    """Insert ``item``, or move it if it is inside; return the new length."""
    if place[item] < 0:
        keys[item] = key
        order[n] = item
        place[item] = n
        rise(keys, order, place, n)
        return n + 1
    before = keys[item]
    keys[item] = key
    if key < before:
        rise(keys, order, place, place[item])
    else:
        sink(keys, order, place, n, place[item])
    return n


@inside
def take(keys, order, place, n, item):
    """Remove ``item`` if it is inside; return the new length."""
    at = place[item]
    if at < 0:
        return n
    place[item] = -1
    n -= 1
    if at < n:
        moved = order[n]
        order[at] = moved
        place[moved] = at
        if keys[moved] < keys[item]:
            rise(keys, order, place, at)
        else:
            sink(keys, order, place, n, at)
    return n


@inside
def settle(keys, items, n, at, item, key):
    """Put the pair of ``item`` and ``key`` at position ``at`` or below, overwriting the pair there.

    For heaps whose members are only asked for the least: nobody needs to know where the others are.
    """
    while True:
        child = 4 * at + 1
        if child >= n:
            break
        least = child
        for other in range(child + 1, min(child + 4, n)):
            if keys[other] < keys[least]:
                least = other
        if keys[least] >= key:
            break
        keys[at], items[at] = keys[least], items[least]
        at = least
    keys[at], items[at] = key, item


@inside
def lift(keys, items, n, item, key):
    """Add ``item`` of ``key`` to a heap of ``n`` pairs."""
    at = n
    while at > 0:
        above = (at - 1) >> 2
        if keys[above] <= key:
            break
        keys[at], items[at] = keys[above], items[above]
        at = above
    keys[at], items[at] = key, item
