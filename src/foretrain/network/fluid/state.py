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

# Columns of tables stand in such an order that what a refill needs is in one cache line.
# Columns of ``flow``: its hops, dependencies and dependents, as ranges; the refill that chose it last; ``MISSING``
# flows that it waits for wholly.
HOP_FIRST, HOP_LAST, PRIORITY, CHOSEN_TICK, BOTTLENECK, PHASE, DONE, STEPS = range(8)
DEPENDENCY_FIRST, DEPENDENCY_LAST, DEPENDENT_FIRST, DEPENDENT_LAST, MISSING, RING, OWNER = range(8, 15)
FLOW_COLUMNS = 16
# Columns of ``fluid``. ``LEFT`` bytes of the step were left at time ``SINCE``, and flow at ``RATE`` since then. Of a
# flow that is over, ``SINCE`` is when it ended.
LEFT, RATE, SINCE, NEW_RATE, WEIGHT, SIZE, LATENCY, RELEASE = range(8)
FLUID_COLUMNS = 8
# Columns of ``link``: its list of active flows in the pool of seats (where, how many); for how many of them it is the
# bottleneck; in this refill, how many are chosen, one of them, how many are not yet frozen; the refills that touched
# it and roused those it holds; the collapsed ring that has it, -1 for none; the refill before which it changed; room
# for how many flows in its list, and how many may come.
SEATS, DEGREE, HELD, CHOSEN, SOMEONE, UNFROZEN = range(6)
TOUCHED_TICK, ROUSED_TICK, TAKEN_BY, DIRTY_TICK, ROOM, RESERVED = range(6, 12)
LINK_COLUMNS = 12
# Columns of ``share``: bytes/ps; in this refill, what flows not yet frozen may share, their weights, the levels that
# it is queued at, was full at, and the highest on it; up to when its utilisation is accounted for; from
# ``USED`` on what each priority class takes.
CAPACITY, ROOM_LEFT, WEIGHTS, QUEUED_AT, LEVEL, HIGHEST, USED_SINCE, USED = range(8)
# Columns of ``hop``, ``seat``, ``dependency``, ``ring`` and ``program``.
LINK, SEAT = range(2)
FLOW, HOP = range(2)
LAG = 1
FIRST, READY, DISTURBED, EXPAND, COLLAPSE = range(5)
RING_COLUMNS = 5
OPEN, COMPLETE = range(2)
# Places in ``counter``: lengths of lists, flows that had their chance to begin, those not over, the number of this
# refill, the mode, and what it has cost.
FLOWS, ADMITTED, QUEUED, DIRTY, NEW, COMPLETED, UNFINISHED, TICK, FULL = range(9)
EVENTS, BATCHES, REFILLED, ROUNDS, FROZEN = range(9, 14)
# Places for what a refill has touched, queued, and frozen at once; lengths of arrays that have room for more;
# refills, from 1 on; rings to expand and to collapse.
TOUCHED, WAITING, FILLED = range(14, 17)
HOPS, SEATED, DEPENDENCIES, DEPENDENTS = range(17, 21)
REFILLS, TO_EXPAND, TO_COLLAPSE = range(21, 24)
COUNTS = 24
# What `foretrain.network.fluid.kernel.advance` may stop at, besides the end of the program of a given index.
NOTHING, ANYTHING = -2, -1
# How it can end.
PAUSED, THERE, RINGS = range(3)
EFFORT = {"events": EVENTS, "batches": BATCHES, "refilled": REFILLED, "rounds": ROUNDS, "frozen": FROZEN}
# Places in ``time``, ps: the present, and the width of a bin of utilisation.
CLOCK, BIN = range(2)


class FluidState(NamedTuple):
    """State of a simulation. Rates are bytes/ps and times float64 ps, so that integers outside come through exactly.

    Attributes:
        flow, fluid: integers and reals of each flow.
        link, share: integers and reals of each link.
        hop: of each hop its link, and its place in that link's list of active flows while it is active.
        seat: the pool of these lists: flow and hop.
        dependency: a flow waited for, and how far it must be ahead.
        dependent: who waits for a flow; -1 - f for a flow f that waits for it wholly.
        ring: its first place in ``member`` (the last row closes the last ring), how many members wait to begin, whether
            something has come to its links; and the lists of rings to expand and to collapse.
        ring_begin: when it did.
        member, member_cost: the flows of each ring in the direction of the data, and what a step took each alone when
            the ring was collapsed.
        scratch: rows of one entry per member of the largest ring.
        program: how many of its flows are not over; the list of programs that completed.
        carried: bytes per link and bin of time, (links, bins); no links if it is not kept.
        key, order, place: the queue of events, one per flow; see `foretrain.network.fluid.heap`.
        queue_level, queue_link: the heap of links by level, during a refill.
        chosen, new, touched, dirty: lists of flows and of links.
        counter, time: scalars.
    """

    flow: NDArray[np.int64]
    fluid: NDArray[np.float64]
    link: NDArray[np.int64]
    share: NDArray[np.float64]
    hop: NDArray[np.int64]
    seat: NDArray[np.int64]
    dependency: NDArray[np.int64]
    dependent: NDArray[np.int64]
    ring: NDArray[np.int64]
    ring_begin: NDArray[np.float64]
    member: NDArray[np.int64]
    member_cost: NDArray[np.float64]
    scratch: NDArray[np.float64]
    program: NDArray[np.int64]
    carried: NDArray[np.float64]
    key: NDArray[np.float64]
    order: NDArray[np.int64]
    place: NDArray[np.int64]
    queue_level: NDArray[np.float64]
    queue_link: NDArray[np.int64]
    chosen: NDArray[np.int64]
    new: NDArray[np.int64]
    touched: NDArray[np.int64]
    dirty: NDArray[np.int64]
    counter: NDArray[np.int64]
    time: NDArray[np.float64]


FLOW_ARRAYS = ("flow", "fluid", "key", "order", "place", "chosen", "new")
"""The arrays with one entry per flow."""


def empty(capacity: NDArray[np.float64], classes: int, bins: int) -> FluidState:
    """Return the state without flows, on links of ``capacity`` bytes/ps; ``bins`` of time are 0 for none."""
    links = len(capacity)
    link, share = whole(links, LINK_COLUMNS), np.zeros((links, USED + classes))
    link[:, TAKEN_BY] = -1
    counter = whole(COUNTS)
    counter[REFILLS] = 1
    share[:, CAPACITY] = capacity
    return FluidState(
        flow=whole(0, FLOW_COLUMNS),
        fluid=np.zeros((0, FLUID_COLUMNS)),
        link=link,
        share=share,
        hop=whole(0, 2),
        seat=whole(0, 2),
        dependency=whole(0, 2),
        dependent=whole(0),
        ring=whole(1, RING_COLUMNS),
        ring_begin=np.zeros(1),
        member=whole(0),
        member_cost=np.zeros(0),
        scratch=np.zeros((5, 0)),
        program=whole(0, 2),
        carried=np.zeros((links if bins else 0, bins)),
        key=np.zeros(0),
        order=whole(0),
        place=whole(0),
        queue_level=np.zeros(links),
        queue_link=whole(links),
        chosen=whole(0),
        new=whole(0),
        touched=whole(links),
        dirty=whole(links),
        counter=counter,
        time=np.array([0.0, 1e6]),
    )


def whole(*shape: int) -> NDArray[np.int64]:
    """Return zeros of int64."""
    return np.zeros(shape, np.int64)


def grown(array: NDArray[Any], length: int) -> NDArray[Any]:
    """Return ``array`` with room for ``length`` rows, at least twice what it had if that was not enough."""
    if length <= len(array):
        return array
    larger = np.zeros((max(length, 2 * len(array)), *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger
