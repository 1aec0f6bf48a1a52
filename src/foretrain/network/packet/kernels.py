"""Kernels as Python runs them: in slices, so that Ctrl-C is handled in between, with a check for stalls after each.

Flows that wait for each other, ports that pause each other, and dead links are stalls.
"""

from __future__ import annotations

import time
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError, StallError
from foretrain.network.packet import event_kernel, window_kernel
from foretrain.network.packet import state as c
from foretrain.network.packet.loading import Prepared
from foretrain.units import NANOSECOND, Time

Kernel: TypeAlias = Literal["auto", "windows", "events"]
"""``"windows"`` is the fast one, ``"events"`` its twin, one event after the other, for links that take no time, too."""

_LEAST: Final = NANOSECOND
"""Links that take less make windows that are hardly worth their while."""
_SHORT: Final = 0.05
_LONG: Final = 0.2
"""Seconds between which a slice should take."""
_MOST: Final = 1 << 24


class Slices:
    """Runs a kernel for about a tenth of a second at a time; results do not depend on the length of a slice.

    Args:
        windows: whether it is the kernel of windows, not that of events.
    """

    def __init__(self, windows: bool) -> None:
        self._windows, self._size = windows, 1 << 10 if windows else 1 << 16

    def load(self, state: c.PacketState) -> None:
        """Hand the first events of new flows to the kernel."""
        if self._windows:
            window_kernel.load(state.memory, state.far)
        else:
            event_kernel.load(state.memory, state.event)

    def run(self, state: c.PacketState) -> int:
        """Run one slice; return the kernel's reason to stop, one of those in `state`."""
        began = time.perf_counter()
        why = self.step(state, self._size)
        took = time.perf_counter() - began
        if took > _LONG:
            self._size = max(self._size // 2, 1)
        elif took < _SHORT and why == c.BREATH:
            self._size = min(2 * self._size, _MOST)
        return why

    def step(self, state: c.PacketState, size: int) -> int:
        """Run at most ``size`` windows or events; return the kernel's reason to stop."""
        if self._windows:
            return window_kernel.run(state.memory, state.real, state.far, state.buffer, state.trace, size)
        return event_kernel.run(state.memory, state.real, state.event, state.trace, size)


def chosen(kernel: Kernel, shortest: Time) -> Slices:
    """Return the runner of the kernel for networks whose shortest link takes ``shortest`` ps.

    Raises:
        ConfigError: windows were asked for, and a link takes no time.
    """
    if kernel == "windows" and shortest < 1:
        raise ConfigError("kernel", "windows", "cannot be where a link takes no time", "use 'auto'")
    return Slices(kernel == "windows" or (kernel == "auto" and shortest >= _LEAST))


_HOPELESS: Final = 1000
"""Timeouts during which nothing at all comes anywhere."""


class StallDetector:
    """Detector of flows that send again and again while nothing arrives, because a link is dead.

    Args:
        ready: what is simulated.
        flows: their addresses.
    """

    def __init__(self, ready: Prepared, flows: NDArray[np.int64]) -> None:
        self._ready, self._flows = ready, flows
        self._came, self._timeouts = self._counts()

    def check(self) -> None:
        """Raise StallError if ports wait for each other, or nothing has arrived for long; called after each slice."""
        came, timeouts = self._counts()
        if came != self._came:
            self._came, self._timeouts = came, timeouts
            return
        if circle := circle_of(self._ready):
            raise StallError("ports pause each other, and none can go on", circle)
        if timeouts >= self._timeouts + _HOPELESS:
            raise stalled(self._ready, self._flows)

    def _counts(self) -> tuple[int, int]:
        m = self._ready.state.memory
        return int(m[c.ARRIVED]), int(m[self._flows + c.TIMEOUTS].sum())


def stalled(ready: Prepared, flows: NDArray[np.int64]) -> StallError:
    """Return the error for ``flows``, by address, some of which can never end."""
    m, real = ready.state.memory, ready.state.real
    ends = m[flows + c.END]
    waiting = []
    for f in flows[ends < 0][:12].tolist():
        short = []
        for dependency in range(m[f + c.FIRST_DEPENDENCY], m[f + c.LAST_DEPENDENCY], c.DEPENDENCY_COLUMNS):
            waited = m[dependency + c.WAITED]
            if m[dependency + c.SEEN_STEPS] < m[waited + c.STEPS]:
                short.append(
                    f"flow {m[waited + c.FLOW_NUMBER]}, of which {m[dependency + c.SEEN_STEPS]} steps have ended"
                )
        done = f"flow {m[f + c.FLOW_NUMBER]} has had {m[f + c.DONE]} of {m[f + c.STEPS]} steps"
        if real[f + c.PEAK] and m[f + c.TRIES] > 0:
            done += f", and gave up after {m[f + c.TRIES]} probes without an answer"
        elif m[f + c.TIMEOUTS] > 0:
            done += f", and has timed out {m[f + c.TIMEOUTS]} times"
        waiting.append(f"{done}; it waits for {', '.join(short[:4]) or 'nothing'}")
    waiting += paused(ready)
    return StallError(f"{int((ends < 0).sum())} of {len(flows)} flows never end", waiting)


def paused(ready: Prepared) -> list[str]:
    """Describe the ports that hold packets which they may not send, the first twelve."""
    port = ready.port
    held = np.flatnonzero((port[:, c.MASK] & port[:, c.PAUSED]) != 0)
    return [f"link {link} is paused and holds {port[link, c.TOTAL]} bytes" for link in held[:12]]


def circle_of(ready: Prepared) -> list[str]:
    """Describe a circle of ports, each of which waits for the next to send; empty where there is none.

    A paused class of a port waits until enough of what came over its link has left the node behind it: for the ports
    there that hold such packets. Where all of them are paused in turn it waits for ever.
    """
    port, m = ready.port, ready.state.memory
    blocked = {
        (int(link), of)
        for link in np.flatnonzero(port[:, c.PAUSED] & port[:, c.MASK])
        for of in range(c.CLASSES)
        # Where ASKED is not set it may go on, and the frame that says so is under way.
        if port[link, c.PAUSED] & port[link, c.MASK] & port[link, c.ASKED] & 1 << of
    }
    if not blocked:
        return []
    holders = {each: _holders(ready, m, *each) for each in blocked}
    # Who waits for somebody that is not blocked will go on, and so will who waits for that one.
    while free := {each for each in blocked if not holders[each] or not holders[each] <= blocked}:
        blocked -= free
    if not blocked:
        return []
    path = [min(blocked)]
    while (following := min(holders[path[-1]])) not in path:
        path.append(following)
    circle = path[path.index(following) :]
    return [
        f"link {link}, class {of}, holds {port[link, c.BYTES + 3 * of]} bytes and waits for link {then}"
        for (link, of), (then, _) in zip(circle, [*circle[1:], circle[0]], strict=True)
    ]


def _holders(ready: Prepared, m: NDArray[np.int64], link: int, of: int) -> set[tuple[int, int]]:
    """Return the ports and classes behind ``link`` in which packets wait that came over it in class ``of``."""
    port = ready.port
    address = ready.network.first_port + link * c.PORT_COLUMNS
    found = set()
    for other in np.flatnonzero(port[:, c.MASK] >> of & 1).tolist():
        p = port[other, c.HEAD + 3 * of]
        while p >= 0:
            if m[p + c.TIE] == address:
                found.add((other, of))
                break
            p = m[p + c.NEXT]
    return found
