"""Loading and unloading of programs in the simulator's state: flows, seats and dependencies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foretrain.collective.plan import WHOLE
from foretrain.network.fluid import kernel
from foretrain.network.fluid import state as c
from foretrain.network.fluid.state import FLOW_ARRAYS, FluidState, grown, whole
from foretrain.network.program import Program


def load(state: FluidState, program: Program, owner: int) -> tuple[FluidState, int]:
    """Append ``program`` as that of ``owner``; return the state and the program's first flow."""
    n, first = len(program), int(state.counter[c.FLOWS])
    last = first + n
    state = state._replace(
        **{name: grown(getattr(state, name), last) for name in FLOW_ARRAYS}, program=grown(state.program, owner + 1)
    )
    flow, fluid = state.flow[first:last], state.fluid[first:last]
    flow[:], fluid[:] = 0, 0.0
    flow[:, c.HOP_FIRST] = state.counter[c.HOPS] + program.paths.first[:-1]
    flow[:, c.HOP_LAST] = state.counter[c.HOPS] + program.paths.first[1:]
    flow[:, c.STEPS], flow[:, c.PRIORITY] = program.steps, program.priority
    flow[:, c.OWNER], flow[:, c.RING], flow[:, c.BOTTLENECK] = owner, -1, -1
    fluid[:, c.SIZE], fluid[:, c.LATENCY] = program.size, program.latency
    fluid[:, c.RELEASE], fluid[:, c.WEIGHT] = program.release, program.weight
    state.place[first:last] = -1
    state.program[owner, c.OPEN] = n
    state.counter[c.FLOWS] += n
    state.counter[c.UNFINISHED] += n
    state = reserve(state, program.paths.links)
    return _with_rings(_wired(state, program, first), first, last), first


def reserve(state: FluidState, links: NDArray[np.int32]) -> FluidState:
    """Append hops over ``links``, and make room on each link for all of them to be active at once."""
    link = state.link
    link[:, c.RESERVED] += np.bincount(links, minlength=len(link))
    short = np.flatnonzero(link[:, c.RESERVED] > link[:, c.ROOM])
    room = np.maximum(link[short, c.RESERVED], 2 * link[short, c.ROOM])
    hops, seats = state.counter[[c.HOPS, c.SEATED]].tolist()
    ends = seats + np.cumsum(room)
    state.counter[c.HOPS], state.counter[c.SEATED] = hops + len(links), seats + room.sum()
    # A flow may have a link queued again by each of its hops.
    queue = len(link) + hops + len(links)
    state = state._replace(
        hop=grown(state.hop, hops + len(links)),
        seat=grown(state.seat, int(state.counter[c.SEATED])),
        queue_level=grown(state.queue_level, queue),
        queue_link=grown(state.queue_link, queue),
    )
    state.hop[hops : hops + len(links), c.LINK] = links
    kernel.reseat(state.link, state.seat, state.hop, short, ends - room, room)
    return state


def unload(state: FluidState, first: int, last: int) -> None:
    """Return what the flows ``first`` to ``last``, which are over, had reserved."""
    flow = state.flow[first:last]
    release(state, ranges(flow[:, c.HOP_FIRST], flow[:, c.HOP_LAST]))


def release(state: FluidState, hops: NDArray[np.integer]) -> None:
    """Return the seats that were reserved for ``hops``."""
    state.link[:, c.RESERVED] -= np.bincount(state.hop[hops, c.LINK], minlength=len(state.link))


def compacted(state: FluidState, kept: Sequence[tuple[int, int]]) -> FluidState:
    """Return the state without the flows outside ``kept``, ascending (first, last) ranges that close ranks.

    Dependencies, rings and seats are renumbered; what is kept runs on as if nothing had happened.
    """
    old = np.concatenate([whole(0), *(np.arange(first, last) for first, last in kept)])
    new = np.full(int(state.counter[c.FLOWS]), -1)
    new[old] = np.arange(len(old))
    flow = state.flow[old]
    hops = _regrouped(flow, c.HOP_FIRST, c.HOP_LAST)
    dependencies = _regrouped(flow, c.DEPENDENCY_FIRST, c.DEPENDENCY_LAST)
    dependents = _regrouped(flow, c.DEPENDENT_FIRST, c.DEPENDENT_LAST)
    dependent, dependency, hop = state.dependent[dependents], state.dependency[dependencies], state.hop[hops]
    dependency[:, c.FLOW] = new[dependency[:, c.FLOW]]
    # Each link's list of active flows moves to the front of the pool, with room for what is reserved.
    new_hop = np.full(len(state.hop), -1)
    new_hop[hops] = np.arange(len(hops))
    link = state.link
    room = link[:, c.RESERVED].copy()
    seats = np.cumsum(room) - room
    taken = ranges(link[:, c.SEATS], link[:, c.SEATS] + link[:, c.DEGREE])
    place = ranges(seats, seats + link[:, c.DEGREE])
    seat = whole(int(room.sum()), 2)
    seat[place, c.FLOW] = new[state.seat[taken, c.FLOW]]
    seat[place, c.HOP] = new_hop[state.seat[taken, c.HOP]]
    hop[seat[place, c.HOP], c.SEAT] = place
    link[:, c.SEATS], link[:, c.ROOM] = seats, room
    queued = int(state.counter[c.QUEUED])
    order = whole(len(old))
    order[:queued] = new[state.order[:queued]]
    state.counter[c.FLOWS] = state.counter[c.ADMITTED] = len(old)
    state.counter[[c.HOPS, c.SEATED, c.DEPENDENCIES, c.DEPENDENTS]] = (
        len(hop),
        len(seat),
        len(dependency),
        len(dependent),
    )
    return _with_kept_rings(
        state._replace(
            **{name: getattr(state, name)[old] for name in FLOW_ARRAYS} | {"flow": flow, "order": order},
            hop=hop,
            seat=seat,
            dependency=dependency,
            dependent=np.where(dependent < 0, -1 - new[-1 - dependent], new[dependent]),
        ),
        new,
    )


def ranges(first: NDArray[np.integer], last: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the integers of ``first[0]:last[0]``, then of ``first[1]:last[1]``, and so on."""
    lengths = (last - first).astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) + np.repeat(first - starts, lengths)


def _regrouped(flow: NDArray[np.int64], first: int, last: int) -> NDArray[np.int64]:
    """Return the entries in the flows' ranges between two columns, and renumber the ranges to match."""
    before = flow[:, first].copy(), flow[:, last].copy()
    lengths = before[1] - before[0]
    flow[:, last] = np.cumsum(lengths)
    flow[:, first] = flow[:, last] - lengths
    return ranges(*before)


def _with_kept_rings(state: FluidState, new: NDArray[np.int64]) -> FluidState:
    """Return the state without the rings whose members are not kept; ``new`` renumbers flows, -1 for those not kept."""
    first = state.ring[:, c.FIRST]
    kept = np.flatnonzero(new[state.member[first[:-1]]] >= 0)
    which = np.full(len(first), -1)  # The last entry serves -1: no ring.
    which[kept] = np.arange(len(kept))
    for column, place in ((state.link, c.TAKEN_BY), (state.flow, c.RING)):
        column[:, place] = which[column[:, place]]
    members = ranges(first[kept], first[kept + 1])
    rows = np.append(kept, len(first) - 1)
    ring = state.ring[rows]
    ring[:, c.FIRST] = np.concatenate([[0], np.cumsum(first[kept + 1] - first[kept])])
    return state._replace(
        ring=ring,
        ring_begin=state.ring_begin[rows],
        member=new[state.member[members]],
        member_cost=state.member_cost[members],
    )


def _wired(state: FluidState, program: Program, first: int) -> FluidState:
    """Enter dependencies: whole ones are counted, those with a lag are looked at one by one."""
    n = len(program)
    flow = state.flow[first : first + n]
    waiter = np.repeat(np.arange(n), np.diff(program.first))
    whole_ = program.lag >= WHOLE
    flow[:, c.MISSING] = np.bincount(waiter[whole_], minlength=n)
    dependencies = np.bincount(waiter[~whole_], minlength=n)
    first_dependency, first_dependent = state.counter[[c.DEPENDENCIES, c.DEPENDENTS]].tolist()
    flow[:, c.DEPENDENCY_LAST] = first_dependency + np.cumsum(dependencies)
    flow[:, c.DEPENDENCY_FIRST] = flow[:, c.DEPENDENCY_LAST] - dependencies
    dependents = np.bincount(program.after, minlength=n)
    flow[:, c.DEPENDENT_LAST] = first_dependent + np.cumsum(dependents)
    flow[:, c.DEPENDENT_FIRST] = flow[:, c.DEPENDENT_LAST] - dependents
    last_dependency, last_dependent = int(flow[-1, c.DEPENDENCY_LAST]), int(flow[-1, c.DEPENDENT_LAST])
    state.counter[c.DEPENDENCIES], state.counter[c.DEPENDENTS] = last_dependency, last_dependent
    state = state._replace(
        dependency=grown(state.dependency, last_dependency), dependent=grown(state.dependent, last_dependent)
    )
    state.dependency[first_dependency:last_dependency, c.FLOW] = program.after[~whole_] + first
    state.dependency[first_dependency:last_dependency, c.LAG] = program.lag[~whole_]
    order = np.argsort(program.after, kind="stable")
    state.dependent[first_dependent:last_dependent] = np.where(whole_, -1 - (waiter + first), waiter + first)[order]
    return state


def _with_rings(state: FluidState, first: int, last: int) -> FluidState:
    """Find the rings in lock step among the flows ``first`` to ``last``."""
    if state.counter[c.FULL] or state.flow[last - 1, c.DEPENDENCY_LAST] == state.flow[first, c.DEPENDENCY_FIRST]:
        return state
    rings, possible = len(state.ring) - 1, (last - first) // 2
    state = state._replace(
        member=np.concatenate([state.member, whole(last - first)]),
        member_cost=np.concatenate([state.member_cost, np.zeros(last - first)]),
        ring=np.concatenate([state.ring, whole(possible, c.RING_COLUMNS)]),
        ring_begin=np.concatenate([state.ring_begin, np.zeros(possible)]),
    )
    found = kernel.find_rings(state, first, last, rings)
    members = int(state.ring[found, c.FIRST])
    largest = int(np.diff(state.ring[: found + 1, c.FIRST]).max(initial=0))
    return state._replace(
        scratch=np.zeros((5, max(largest, state.scratch.shape[1]))),
        member=state.member[:members].copy(),
        member_cost=state.member_cost[:members].copy(),
        ring=state.ring[: found + 1].copy(),
        ring_begin=state.ring_begin[: found + 1].copy(),
    )
