"""The fluid simulator's state: a few 2-D arrays that kernels change in place and Python grows by doubling.

What a row holds is said by constants below, e.g. ``state.fluid[f, RATE]``. numba compiles 2-D arrays well; it takes
half a minute over a tuple of seventy columns, and counts references at every access to an array of records.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# What a flow is doing. A collapsed flow is a member of a ring that nothing disturbs; see Note [Collapsed rings].
IDLE, LATENT, ACTIVE, COLLAPSED, OVER, CANCELLED = range(6)

# Columns of ``flow``: its hops; the gates it waits for and the heirs that wait for it, as ranges; ``MISSING`` flows
# that it waits for wholly; the refill that chose it last.
HOP_FIRST, HOP_LAST, GATE_FIRST, GATE_LAST, HEIR_FIRST, HEIR_LAST, STEPS, PRIORITY = range(8)
OWNER, MISSING, PHASE, DONE, BOTTLENECK, RING, CHOSEN_TICK = range(8, 15)
FLOW_COLUMNS = 15
# Columns of ``fluid``. ``LEFT`` bytes of the step were left at time ``SINCE``, and flow at ``RATE`` since then.
SIZE, LATENCY, RELEASE, WEIGHT, LEFT, RATE, SINCE, FINISH, NEW_RATE = range(9)
FLUID_COLUMNS = 9
# Columns of ``link``: its list of active flows in the pool of seats (where, how many, room for how many, how many may
# come); the collapsed ring that has it, -1 for none; flows not yet frozen in this refill; the last that touched it.
SEATS, DEGREE, ROOM, RESERVED, TAKEN_BY, UNFROZEN, TOUCHED_TICK, DIRTY_TICK = range(8)
LINK_COLUMNS = 8
# Columns of ``share``: bytes/ps; in this refill, what flows not yet frozen may share, their weights, and the level at
# which it was full; up to when its utilisation is accounted for.
CAPACITY, ROOM_LEFT, WEIGHTS, LEVEL, USED_SINCE = range(5)
SHARE_COLUMNS = 5
# Columns of ``hop``, ``seat``, ``gate``, ``ring`` and ``program``.
LINK, SEAT = range(2)
FLOW, HOP = range(2)
LAG = 1
FIRST, READY = range(2)
OPEN, COMPLETE = range(2)
# Places in ``counter``: lengths of lists, flows that had their chance to begin, those not over, the number of this
# refill, the mode, and what it has cost.
FLOWS, ADMITTED, QUEUED, DIRTY, NEW, COMPLETED, UNFINISHED, TICK, FULL = range(9)
EVENTS, BATCHES, REFILLED, ROUNDS, FROZEN = range(9, 14)
COUNTS = 14
EFFORT = {"events": EVENTS, "batches": BATCHES, "refilled": REFILLED, "rounds": ROUNDS, "frozen": FROZEN}
# Places in ``time``, ps: the present, and the width of a bin of utilisation.
CLOCK, BIN = range(2)


class State(NamedTuple):
    """One simulation. Rates are bytes/ps and times float64 ps, so that the integers outside come through exactly.

    Attributes:
        flow, fluid: integers and reals of each flow.
        link, share: integers and reals of each link.
        hop: of each hop its link, and its place in that link's list of active flows while it is active.
        seat: the pool of these lists: flow and hop.
        gate: a flow waited for, and how far it must be ahead.
        heir: who waits for a flow; -1 - f for a flow f that waits for it wholly.
        ring: its first place in ``member`` (the last row closes the last ring), and how many members wait to begin.
        ring_begin: when it did.
        member, member_cost: the flows of each ring in the direction of the data, and what a step took each alone when
            the ring was collapsed.
        scratch: rows of one entry per member of the largest ring.
        program: how many of its flows are not over; the list of programs that completed.
        used: bytes/ps taken by each priority class on each link, (classes, links).
        carried: bytes per link and bin of time, (links, bins); no links if it is not kept.
        key, order, place: the queue of events, one per flow; see `foretrain.network.fluid.heap`.
        link_key, link_order, link_place: the queue of links by level, during a refill.
        chosen, new, touched, dirty: lists of flows and of links.
        counter, time: scalars.
    """

    flow: NDArray[np.int64]
    fluid: NDArray[np.float64]
    link: NDArray[np.int64]
    share: NDArray[np.float64]
    hop: NDArray[np.int64]
    seat: NDArray[np.int64]
    gate: NDArray[np.int64]
    heir: NDArray[np.int64]
    ring: NDArray[np.int64]
    ring_begin: NDArray[np.float64]
    member: NDArray[np.int64]
    member_cost: NDArray[np.float64]
    scratch: NDArray[np.float64]
    program: NDArray[np.int64]
    used: NDArray[np.float64]
    carried: NDArray[np.float64]
    key: NDArray[np.float64]
    order: NDArray[np.int64]
    place: NDArray[np.int64]
    link_key: NDArray[np.float64]
    link_order: NDArray[np.int64]
    link_place: NDArray[np.int64]
    chosen: NDArray[np.int64]
    new: NDArray[np.int64]
    touched: NDArray[np.int64]
    dirty: NDArray[np.int64]
    counter: NDArray[np.int64]
    time: NDArray[np.float64]


FLOW_ARRAYS = ("flow", "fluid", "key", "order", "place", "chosen", "new")
"""The arrays with one entry per flow."""


def empty(capacity: NDArray[np.float64], classes: int, bins: int) -> State:
    """No flows yet on links of ``capacity`` bytes/ps, ``classes`` priority classes, ``bins`` bins of time (0: none)."""
    links = len(capacity)
    link, share = whole(links, LINK_COLUMNS), np.zeros((links, SHARE_COLUMNS))
    link[:, TAKEN_BY] = -1
    share[:, CAPACITY] = capacity
    return State(
        flow=whole(0, FLOW_COLUMNS),
        fluid=np.zeros((0, FLUID_COLUMNS)),
        link=link,
        share=share,
        hop=whole(0, 2),
        seat=whole(0, 2),
        gate=whole(0, 2),
        heir=whole(0),
        ring=whole(1, 2),
        ring_begin=np.zeros(1),
        member=whole(0),
        member_cost=np.zeros(0),
        scratch=np.zeros((5, 0)),
        program=whole(0, 2),
        used=np.zeros((classes, links)),
        carried=np.zeros((links if bins else 0, bins)),
        key=np.zeros(0),
        order=whole(0),
        place=whole(0),
        link_key=np.zeros(links),
        link_order=whole(links),
        link_place=whole(links) - 1,
        chosen=whole(0),
        new=whole(0),
        touched=whole(links),
        dirty=whole(links),
        counter=whole(COUNTS),
        time=np.array([0.0, 1e6]),
    )


def whole(*shape: int) -> NDArray[np.int64]:
    """Zeros."""
    return np.zeros(shape, np.int64)


def grown(array: NDArray[Any], length: int) -> NDArray[Any]:
    """``array`` with room for ``length`` rows, at least twice what it had if that was not enough."""
    if length <= len(array):
        return array
    larger = np.zeros((max(length, 2 * len(array)), *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger
