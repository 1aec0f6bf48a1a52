"""Window kernel and event kernel as Python calls them: in slices, so that Ctrl-C is handled in between."""

from __future__ import annotations

import time
from typing import Final, Literal, TypeAlias

from foretrain.errors import ConfigError
from foretrain.network.packet import event_kernel, window_kernel
from foretrain.network.packet import state as c
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
