"""The fluid simulator: programs are added while time passes.

    network = Fluid(topology.capacity)
    first = network.add(program)                 # now
    network.predict(first)                       # when it would complete if nothing else were added
    for done in network.advance(until=2 * MILLISECOND):
        ...

Times at the border are int ps; inside they are float64, exact for integers up to 2^53 ps (2.5 hours).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError, StallError
from foretrain.network.fluid import kernel
from foretrain.network.fluid import state as c
from foretrain.network.fluid.loading import compacted, load, release, reserve, unload
from foretrain.network.fluid.state import ACTIVE, EFFORT, IDLE, FluidState, empty
from foretrain.network.program import Paths, Program, ProgramHandle
from foretrain.units import SECOND, Time

_SHOWN = 12
"""Lines of each kind: a reader needs the first ones, and a million flows may wait."""


def stalled(
    state: FluidState, ranges: Sequence[tuple[int, int]], name: Callable[[int], str] = "link {}".format
) -> StallError:
    """Return the error for flows in ``ranges`` that can never go on: starved of rate, or waiting for each other.

    Args:
        state: the network's.
        ranges: (first, last) flows of each program that has not completed.
        name: names a link.
    """
    flows = np.concatenate([np.arange(first, last) for first, last in ranges])
    starved = flows[state.flow[flows, c.PHASE] == ACTIVE]
    idle = flows[state.flow[flows, c.PHASE] == IDLE]
    waits = [line for _, line in zip(range(_SHOWN), _starved(state, starved, name), strict=False)]
    waits += [line for _, line in zip(range(_SHOWN), _waiting(state, idle), strict=False)]
    left = len(starved) + len(idle)
    time = state.time[c.CLOCK] / 1e9
    return StallError(f"nothing more can happen at {time:.6g} ms and {left} flows are not over:", waits)


def _starved(state: FluidState, flows: NDArray[np.int64], name: Callable[[int], str]) -> Iterator[str]:
    for f in flows.tolist():
        link, step, klass = state.flow[f, [c.BOTTLENECK, c.DONE, c.PRIORITY]].tolist()
        down = state.share[link, c.CAPACITY] <= 0
        why = "which is down" if down else f"which classes before its class {klass} keep busy"
        yield f"flow {f}: {state.fluid[f, c.LEFT]:.6g} bytes of its step {step} wait for {name(link)}, {why}"


def _waiting(state: FluidState, flows: NDArray[np.int64]) -> Iterator[str]:
    for f in flows.tolist():
        step = int(state.flow[f, c.DONE])
        for d in range(*state.flow[f, [c.DEPENDENCY_FIRST, c.DEPENDENCY_LAST]]):
            other, lag = state.dependency[d].tolist()
            made, steps = state.flow[other, [c.DONE, c.STEPS]].tolist()
            if made < (need := min(steps, step + lag)):
                yield f"flow {f}: its step {step} waits for {need} steps of flow {other}, which has made {made}"
        if not state.flow[f, c.MISSING]:
            continue
        # Whoever has the dependent in their range is waited for.
        for dependent in np.flatnonzero(state.dependent == -1 - f).tolist():
            mine = (state.flow[:, c.DEPENDENT_FIRST] <= dependent) & (dependent < state.flow[:, c.DEPENDENT_LAST])
            other = int(np.flatnonzero(mine)[0])
            made, steps = state.flow[other, [c.DONE, c.STEPS]].tolist()
            if made < steps:
                yield f"flow {f}: waits for all {steps} steps of flow {other}, which has made {made}"


_SLICE = 1 << 14
"""Batches between two looks at signals, so that Ctrl-C is heard."""
_DEAD = 4096
"""Flows that are over may be this many, and as many as live ones, before the arrays are compacted."""


class Fluid:
    """Flows on links, max-min fair. Not thread-safe.

    Args:
        capacity: bytes/s of each link, float64 of shape (links,); 0 for one that is down.
        classes: strict-priority classes, 1 to 8; a program's priorities are below it.
        bins: if positive, an even number: utilisation of each link is kept in that many bins of time.
        full: recompute every flow at every event instead of those that can change: slower, the same result; an oracle.
        name: of a link, for errors, e.g. `Topology.link_name`.
    """

    def __init__(
        self,
        capacity: NDArray[np.float64],
        *,
        classes: int = 1,
        bins: int = 0,
        full: bool = False,
        name: Callable[[int], str] = "link {}".format,
    ) -> None:
        self._name = name
        if not 1 <= classes <= 8:
            raise ConfigError("classes", classes, "is not a number of priority classes", "take 1 to 8")
        if bins < 0 or bins % 2:
            raise ConfigError("bins", bins, "is not an even number of bins", "take e.g. 64, or 0 for none")
        rates = np.asarray(capacity, np.float64)
        if not (np.isfinite(rates) & (rates >= 0)).all():
            link = int(np.flatnonzero(~(np.isfinite(rates) & (rates >= 0)))[0])
            raise ConfigError(
                f"capacity[{link}]", rates[link], "is not a rate", "give bytes/s, 0 for a link that is down"
            )
        self._state: FluidState = empty(rates / SECOND, classes, bins)
        self._state.counter[c.FULL] = full
        self._running: dict[int, ProgramHandle] = {}
        self._live = 0
        self._ahead: Fluid | None = None
        self._ends: dict[int, Time] = {}

    @property
    def now(self) -> Time:
        """Return the present, ps."""
        return math.ceil(float(self._state.time[c.CLOCK]))

    @property
    def running(self) -> tuple[ProgramHandle, ...]:
        """Return the programs that have not completed, in the order of their addition."""
        return tuple(self._running.values())

    @property
    def effort(self) -> dict[str, int]:
        """Return the work done so far: events, batches of simultaneous ones, flows refilled, rounds, hops frozen."""
        return {name: int(self._state.counter[place]) for name, place in EFFORT.items()}

    def rates(self, handle: ProgramHandle) -> NDArray[np.float64]:
        """Return the bytes/s of every flow of ``handle`` now; of a collapsed ring's members, which share no link, 0."""
        self._check_running(handle)
        first, last = handle._range
        return self._state.fluid[first:last, c.RATE] * SECOND

    def progress(self, handle: ProgramHandle) -> NDArray[np.float64]:
        """Return the part of each flow of ``handle`` that is done, 0 to 1; of a collapsed ring's members, 0 until they
        end."""
        if handle.end is not None:
            return np.ones(len(handle.program))
        self._check_running(handle)
        first, last = handle._range
        flow, fluid = self._state.flow[first:last], self._state.fluid[first:last]
        size, now = fluid[:, c.SIZE], self._state.time[c.CLOCK]
        left = fluid[:, c.LEFT] - fluid[:, c.RATE] * (now - fluid[:, c.SINCE])
        busy = flow[:, c.PHASE] == c.ACTIVE
        inside = np.where(busy, 1 - left / np.where(size > 0, size, 1), 0.0)
        return (flow[:, c.DONE] + inside) / flow[:, c.STEPS]

    def add(self, program: Program, at: Time | None = None) -> ProgramHandle:
        """Start ``program`` now, or at ``at``, up to which time then passes first.

        Releases in the program count from the network's time 0.
        """
        if at is not None:
            self.pass_to(at)
        self._check(program)
        self._changed()
        if self._state.counter[c.FLOWS] > 2 * self._live + _DEAD:
            self._compact()
        handle = ProgramHandle(program, self.now, finish=np.full(len(program), np.nan))
        if not len(program):
            handle.end = handle.added
            return handle
        handle._index = next(reversed(self._running), -1) + 1
        self._live += len(program)
        self._state, handle._first = load(self._state, program, handle._index)
        self._running[handle._index] = handle
        self._settle()
        return handle

    def advance(self, until: Time | None = None, *, stop: bool = False) -> tuple[ProgramHandle, ...]:
        """Let time pass to ``until``, or until everything is done; return what completed, in order.

        Args:
            until: ps; None for as long as anything can happen.
            stop: whether to stop where the first program completes.

        Raises:
            StallError: without ``until``, if what is left can never complete; lists who waits for what.
        """
        limit = math.inf if until is None else float(until)
        if limit < float(self._state.time[c.CLOCK]):
            raise ConfigError("until", until, "is past", f"it is {self.now} ps now")
        self._run(limit, c.ANYTHING if stop else c.NOTHING)
        done = self._collect()
        if until is None and self._running and not (stop and done):
            raise stalled(self._state, [handle._range for handle in self._running.values()], self._name)
        return done

    def pass_to(self, time: Time) -> None:
        """Let time pass to ``time``; handles tell which programs completed on the way."""
        self.advance(time)

    def next_event(self) -> float:
        """Return the time of the next event, float ps; infinity if there is none."""
        state = self._state
        return float(state.key[state.order[0]]) if state.counter[c.QUEUED] else math.inf

    def predict(self, handle: ProgramHandle) -> Time:
        """Return when ``handle`` would complete if nothing else were added or changed, ps.

        Runs a copy ahead, once for all questions until something comes or changes.

        Raises:
            StallError: it would never.
        """
        if handle.end is not None:
            return handle.end
        if handle.cancelled:
            raise ConfigError("handle", handle._index, "was cancelled", "ask for a program that runs")
        if self._ahead is None:
            self._ahead = self._copy()
        if handle._index not in self._ends:
            self._ahead._run(math.inf, handle._index)
            self._ends |= {done._index: done.end or 0 for done in self._ahead._collect()}
        if handle._index not in self._ends:
            raise stalled(self._ahead._state, [one._range for one in self._ahead.running], self._name)
        return self._ends[handle._index]

    def next_completion(self) -> Time | None:
        """Return when the next program would complete if nothing were added or changed, ps; None if none runs.

        Raises:
            StallError: what runs can never complete.
        """
        if not self._running:
            return None
        if self._ahead is None:
            self._ahead = self._copy()
        while not any(index in self._ends for index in self._running):
            for done in self._ahead.advance(stop=True):
                self._ends[done._index] = done.end or 0
        return min(self._ends[index] for index in self._running if index in self._ends)

    def cancel(self, handle: ProgramHandle) -> None:
        """Remove ``handle`` from the network, now. What it has sent stays sent."""
        self._check_running(handle)
        self._changed()
        self._expand_flows(np.arange(*handle._range))
        kernel.withdraw(self._state, *handle._range)
        self._settle()
        handle.cancelled = True
        self._forget(handle)

    def set_capacity(self, links: Sequence[int] | NDArray[np.integer], capacity: float | NDArray[np.float64]) -> None:
        """Give ``links`` a new capacity in bytes/s, now; 0 takes them down, and what crosses them waits."""
        chosen = np.asarray(links, np.int32).reshape(-1)
        values = np.broadcast_to(np.asarray(capacity, np.float64) / SECOND, chosen.shape).copy()
        self._check_links(chosen)
        if not (np.isfinite(values) & (values >= 0)).all():
            raise ConfigError("capacity", capacity, "is not a rate", "give bytes/s, 0 for a link that is down")
        self._changed()
        self._expand(self._state.link[chosen, c.TAKEN_BY])
        kernel.rewire(self._state, chosen, values)
        self._settle()

    def reroute(self, handle: ProgramHandle, flows: NDArray[np.integer], paths: Paths) -> None:
        """Put ``flows`` of ``handle`` on new ``paths``, now: what they have sent stays sent, the rest goes there."""
        if len(flows) != len(paths):
            raise ConfigError("paths", len(paths), "are not one per flow", f"give {len(flows)}")
        self._check_running(handle)
        wrong = flows[(flows < 0) | (flows >= len(handle.program))]
        if len(wrong):
            raise ConfigError("flows", int(wrong[0]), "is no flow", f"they are 0 to {len(handle.program) - 1}")
        if len(np.unique(flows)) < len(flows):
            raise ConfigError("flows", flows.tolist()[:8], "name one twice", "give each flow one path")
        self._check_links(paths.links)
        self._changed()
        self._expand_flows(handle._first + flows)
        # The list of flows without a rate has room for each once: whoever was expanded gets one before it moves.
        self._settle()
        first = int(self._state.counter[c.HOPS])
        self._state = reserve(self._state, paths.links)
        for flow, begin, end in zip(flows.tolist(), paths.first[:-1], paths.first[1:], strict=True):
            flow += handle._first
            before = self._state.flow[flow, [c.HOP_FIRST, c.HOP_LAST]]
            kernel.move(self._state, flow, first + int(begin), first + int(end))
            release(self._state, np.arange(*before))
        self._settle()

    def utilisation(self) -> tuple[NDArray[np.float64], Time]:
        """Return each link's bytes up to now in equal bins of time, (links, bins), and the bins' width in ps.

        A collapsed ring's bytes appear when it ends, spread evenly over the time it ran.
        """
        if not self._state.carried.shape[1]:
            raise ConfigError("bins", 0, "keep no utilisation", "make the network with e.g. bins=64")
        kernel.carry_all(self._state)
        return self._state.carried.copy(), int(self._state.time[c.BIN])

    def _run(self, until: float, stop: int) -> None:
        """Let time pass to ``until``, or to what ``stop`` says; see `foretrain.network.fluid.kernel.advance`."""
        state = self._state
        while (came := kernel.advance(state, until, _SLICE, stop)) != c.THERE:
            if came == c.RINGS:
                self._rearrange()
            elif (stop == c.ANYTHING and state.counter[c.COMPLETED]) or (stop >= 0 and not state.program[stop, c.OPEN]):
                break

    def _settle(self) -> None:
        """Begin what may begin, and find the rates after a change; no time passes."""
        while kernel.advance(self._state, self._state.time[c.CLOCK], 0, c.NOTHING) == c.RINGS:
            self._rearrange()

    def _rearrange(self) -> None:
        """Expand and collapse the rings that wait for it."""
        if self._state.counter[c.TO_EXPAND]:
            kernel.expand(self._state)
        if self._state.counter[c.TO_COLLAPSE]:
            kernel.collapse(self._state)

    def _expand(self, rings: NDArray[np.int64]) -> None:
        """Expand ``rings``, which may repeat, and be -1 for none."""
        disturbed = np.unique(rings[rings >= 0])
        self._state.ring[: len(disturbed), c.EXPAND] = disturbed
        self._state.counter[c.TO_EXPAND] = len(disturbed)
        self._rearrange()

    def _expand_flows(self, flows: NDArray[np.integer]) -> None:
        """Expand the rings of those of ``flows`` that are collapsed."""
        flow = self._state.flow[flows]
        self._expand(flow[flow[:, c.PHASE] == c.COLLAPSED, c.RING])

    def _compact(self) -> None:
        """Remove the flows that are over."""
        self._state = compacted(self._state, [handle._range for handle in self._running.values()])
        place = 0
        for handle in self._running.values():
            handle._first = place
            place += len(handle.program)

    def _changed(self) -> None:
        """Forget predictions."""
        self._ahead = None
        self._ends.clear()

    def _copy(self) -> Fluid:
        twin = Fluid(np.zeros(0))
        # What links carry is not asked of the twin.
        twin._state = FluidState._make(array.copy() for array in self._state._replace(carried=np.zeros((0, 0))))
        twin._running = {
            index: ProgramHandle(one.program, one.added, _first=one._first, _index=index)
            for index, one in self._running.items()
        }
        return twin

    def _collect(self) -> tuple[ProgramHandle, ...]:
        state = self._state
        done = tuple(self._running[int(index)] for index in state.program[: state.counter[c.COMPLETED], c.COMPLETE])
        state.counter[c.COMPLETED] = 0
        for handle in done:
            handle.finish = state.fluid[slice(*handle._range), c.SINCE].copy()
            handle.end = math.ceil(handle.finish.max())
            self._forget(handle)
        return done

    def _forget(self, handle: ProgramHandle) -> None:
        del self._running[handle._index]
        self._live -= len(handle.program)
        unload(self._state, *handle._range)

    def _check_running(self, handle: ProgramHandle) -> None:
        if self._running.get(handle._index) is not handle:
            state = "was cancelled" if handle.cancelled else "has completed or is of another network"
            raise ConfigError("handle", handle._index, state, "name a program that runs")

    def _check(self, program: Program) -> None:
        classes = self._state.share.shape[1] - c.USED
        wrong = program.priority[(program.priority < 0) | (program.priority >= classes)]
        if len(wrong):
            raise ConfigError("priority", int(wrong[0]), "is no class", f"this network has 0 to {classes - 1}")
        self._check_links(program.paths.links)

    def _check_links(self, links: NDArray[np.int32]) -> None:
        wrong = links[(links < 0) | (links >= len(self._state.link))]
        if len(wrong):
            raise ConfigError("links", int(wrong[0]), "is no link", f"they are 0 to {len(self._state.link) - 1}")


def run(
    program: Program,
    capacity: NDArray[np.float64],
    *,
    classes: int = 1,
    full: bool = False,
    name: Callable[[int], str] = "link {}".format,
) -> ProgramHandle:
    """Run one program alone to its end; arguments as of `Fluid`.

    Raises:
        StallError: it can never complete.
    """
    network = Fluid(capacity, classes=classes, full=full, name=name)
    handle = network.add(program)
    network.advance()
    return handle
