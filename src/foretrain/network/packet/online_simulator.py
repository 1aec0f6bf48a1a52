"""A packet network to which programs are added while time passes, as in `foretrain.network.fluid`.

    network = Packets(topology, transport=Dctcp()).online()
    first = network.add(program)                 # now
    network.predict(first)                       # when it would complete if nothing else were added
    for done in network.advance(until=2 * MILLISECOND):
        ...

Times are int ps, as are those in a handle's ``finish``, in float64.

# Note [Ahead]
A kernel goes from window to window, and completions in one are known at its end. A program may be added in the middle
of it. So the network itself stands at the last end of a window, and a copy of it runs ahead: a completion in the copy
up to the present is one, and is found again later. A new program begins in the network, at its time to the ps. The copy
also answers predictions; when its window is past and nothing was added, it becomes the network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError, StallError
from foretrain.network.packet import state as c
from foretrain.network.packet.kernels import Slices, StallDetector, stalled
from foretrain.network.packet.loading import Prepared, RowAllocator, begin, grow, margin, need
from foretrain.network.program import Program, ProgramHandle
from foretrain.units import Time


class Online:
    """A network of packets to which programs are added while time passes. Not thread-safe.

    A flow is a new connection: it begins with its transport's first window. Where no window reaches beyond ``until`` of
    `advance`, what follows from a completion begins at its time exactly; after `advance` without ``until``, where
    everything has completed, what is added begins with the next window, which is shorter than the shortest link takes.

    Args:
        ready: the network, without flows.
        kernel: what runs it.
    """

    def __init__(self, ready: Prepared, kernel: Slices) -> None:
        self._ready, self._kernel = ready, kernel
        self._allocator = RowAllocator(ready)
        self._width = 1 << int(ready.state.memory[c.SHIFT])
        self._now: Time = 0
        self._running: dict[int, ProgramHandle] = {}
        self._next = self._flows = 0
        self._ahead: Prepared | None = None
        self._ends: dict[int, NDArray[np.float64]] = {}

    @property
    def now(self) -> Time:
        """Return the present, ps."""
        return self._now

    @property
    def running(self) -> tuple[ProgramHandle, ...]:
        """Return the programs that have not completed, in the order of their addition."""
        return tuple(self._running.values())

    @property
    def memory(self) -> int:
        """Return the bytes of its rows: bounded by what is in flight at a time, not by all that was ever added."""
        return self._ready.state.memory.nbytes

    def add(
        self, program: Program, at: Time | None = None, *, enough: NDArray[np.integer] | None = None
    ) -> ProgramHandle:
        """Start ``program`` now, or at ``at``, up to which time then passes first.

        Releases in the program count from the network's time 0; a priority is the class of a flow's packets, 0 to 7.
        ``enough``, (flows,), is how many bytes of a step suffice, where that differs from the transport's share.
        """
        if at is not None:
            self.advance(at)
        handle = ProgramHandle(program, self._now, finish=np.full(len(program), np.nan))
        if not len(program):
            handle.end = handle.added
            return handle
        self._changed()
        state = self._ready.state
        block = self._allocator.place(state, program, self._flows)
        handle._first, handle._index = block.first_flow, self._next
        self._running[self._next] = handle
        self._next += 1
        self._flows += len(program)
        m, transport = state.memory, self._ready.network.transport
        flow = state.rows(block.first_flow, c.FLOW_COLUMNS, block.flows)
        if enough is not None:
            flow[:, c.NEED], flow[:, c.WHOLE] = enough, np.ceil(program.size) - enough < transport.payload
        # Windows that are over cannot be gone back to.
        flow[:, c.RELEASE] = np.maximum(flow[:, c.RELEASE], max(self._now, int(m[c.NOW]) << int(m[c.SHIFT])))
        m[block.program + c.OPEN_FLOWS] = len(program)
        begin(state, block)
        need(state, margin(transport, block), len(program) + margin(transport, block))
        self._kernel.load(state)
        return handle

    def advance(self, until: Time | None = None, *, stop: bool = False) -> tuple[ProgramHandle, ...]:
        """Let time pass to ``until``, or until everything is done; return what completed, in order.

        Args:
            until: ps; None for as long as anything can happen.
            stop: whether to stop where the first program completes.

        Raises:
            StallError: without ``until``, if what is left can never complete; says who waits for whom.
        """
        if until is not None and until < self._now:
            raise ConfigError("until", until, "is past", f"it is {self._now} ps now")
        if stop and self._running:
            self._look(until, any)
            first = min((self._end(index) for index in self._ends), default=None)
            until = first if until is None or (first is not None and first < until) else until
        if until is None:
            return self._rest()
        if self._ahead is not None and not self._take_over(until):
            self._look(until, all)
        else:
            self._pass(until)
            if not self._known(all):
                self._look(until, all)
        self._now = until
        return self._collect()

    def predict(self, handle: ProgramHandle) -> Time:
        """Return when ``handle`` would complete if nothing else were added or changed, ps.

        Runs a copy ahead, once for all questions until something comes or changes.

        Raises:
            StallError: it would never.
        """
        if handle.end is not None:
            return handle.end
        self._check(handle)
        self._look(None, lambda _: handle._index in self._ends)
        if handle._index not in self._ends:
            raise self._stalled()
        return self._end(handle._index)

    def next_completion(self) -> Time | None:
        """Return when the next program would complete if nothing were added or changed, ps; None if none runs.

        Raises:
            StallError: what runs can never complete.
        """
        if not self._running:
            return None
        self._look(None, any)
        if not self._ends:
            raise self._stalled()
        return min(map(self._end, self._ends))

    def cancel(self, handle: ProgramHandle) -> None:
        """Stop ``handle`` from the present window on; packets in flight go on their way."""
        self._check(handle)
        self._changed()
        state = self._ready.state
        flow = state.rows(handle._first, c.FLOW_COLUMNS, len(handle.program))
        ended = flow[:, c.END] >= 0
        # Without steps nothing may go; what is silent does not answer, and does not send again.
        flow[:, c.PROTOCOL], flow[:, c.DUE], flow[:, c.STEPS] = c.SILENT, -1, 0
        flow[~ended, c.END] = self._now
        state.memory[c.UNFINISHED] -= int((~ended).sum())
        handle.cancelled = True
        self._remove(handle)

    def _rest(self) -> tuple[ProgramHandle, ...]:
        """Run until every program has completed; time stops at the last completion."""
        if self._ahead is not None:
            self._ready, self._ahead = self._ahead, None
        self._pass(None)
        if not self._known(all):
            raise self._stalled()
        self._now = max(map(self._end, self._ends), default=self._now)
        return self._collect()

    def _pass(self, until: Time | None) -> None:
        """Run the network up to ``until``, or None for until all has completed."""
        while until is not None or not self._known(all):
            why = self._run(self._ready, c.FOREVER if until is None else until)
            self._note(self._ready)
            if why != c.BREATH:
                return

    def _look(self, until: Time | None, enough: Callable[[list[bool]], bool]) -> None:
        """Run the copy until all completions by ``until`` are known, or `_known` says that it is enough."""
        limit = c.FOREVER if until is None else until + self._width
        if self._ahead is None:
            self._ahead = dataclasses.replace(self._ready, state=self._ready.state.copy())
        while not self._known(enough):
            why = self._run(self._ahead, limit)
            self._note(self._ahead)
            if why != c.BREATH:
                return

    def _known(self, enough: Callable[[list[bool]], bool]) -> bool:
        return enough([index in self._ends for index in self._running])

    def _run(self, ready: Prepared, until: int) -> int:
        """Run the kernel to ``until`` or until a program completes; return `state.BREATH` where one did."""
        state = ready.state
        state.memory[c.UNTIL] = until
        detector = StallDetector(ready, self._addresses())
        while True:
            why = self._kernel.run(state)
            detector.check()
            if why == c.GROW:
                grow(state)
            elif why != c.BREATH or state.memory[c.COMPLETED]:
                return why

    def _note(self, ready: Prepared) -> None:
        """Note which programs have ended in ``ready``, and when their flows did."""
        m = ready.state.memory
        m[c.COMPLETED] = 0
        for index, handle in self._running.items():
            if index not in self._ends and m[m[handle._first + c.PROGRAM] + c.OPEN_FLOWS] == 0:
                flow = ready.state.rows(handle._first, c.FLOW_COLUMNS, len(handle.program))
                self._ends[index] = flow[:, c.END].astype(np.float64)

    def _take_over(self, until: Time) -> bool:
        """Make the copy the network if nothing in it is later than ``until``; return whether it did."""
        ahead = self._ahead
        assert ahead is not None
        m = ahead.state.memory
        passed = int(m[c.NOW]) << int(m[c.SHIFT])
        if m[c.QUEUED_EVENTS] or passed == 0 or passed > until:
            return False  # The time of a copy that goes event by event is not kept.
        self._ready, self._ahead = ahead, None
        return True

    def _changed(self) -> None:
        """Bring the network to the present, and forget predictions."""
        if self._ahead is None or not self._take_over(self._now):
            self._ahead = None
        self._pass(self._now)
        self._ends.clear()

    def _collect(self) -> tuple[ProgramHandle, ...]:
        """Return the programs that have completed by now."""
        ends = sorted((end, index) for index in self._ends if (end := self._end(index)) <= self._now)
        done = tuple(self._running[index] for _, index in ends)
        for end, index in ends:
            handle = self._running[index]
            handle.finish, handle.end = self._ends.pop(index), end
            self._remove(handle)
        return done

    def _end(self, index: int) -> Time:
        return int(self._ends[index].max())

    def _remove(self, handle: ProgramHandle) -> None:
        del self._running[handle._index]
        self._allocator.over(handle._first)

    def _check(self, handle: ProgramHandle) -> None:
        if self._running.get(handle._index) is not handle:
            state = "was cancelled" if handle.cancelled else "has completed or is of another network"
            raise ConfigError("handle", handle._index, state, "name a program that runs")

    def _addresses(self) -> NDArray[np.int64]:
        """Return the addresses of the flows of all running programs."""
        flows = [each._first + c.FLOW_COLUMNS * np.arange(len(each.program)) for each in self._running.values()]
        return np.concatenate([np.zeros(0, np.int64), *flows])

    def _stalled(self) -> StallError:
        return stalled(self._ready if self._ahead is None else self._ahead, self._addresses())
