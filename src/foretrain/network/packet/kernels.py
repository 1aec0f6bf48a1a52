"""The two kernels, as Python calls them: for so long at a time that Ctrl-C is heard."""

from __future__ import annotations

import time
from typing import Final, Literal, Protocol, TypeAlias

from foretrain.errors import ConfigError
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


class Steps(Protocol):
    """A kernel."""

    size: int
    """How much it does at first."""

    def load(self, state: c.PacketState) -> None:
        """Puts what hosts begin with into the hands of the kernel."""
        ...

    def run(self, state: c.PacketState, size: int) -> int:
        """Goes on for so many windows or events; why it returns is one of `state`'s."""
        ...


class Windows:
    """Window after window."""

    size = 1 << 10

    def load(self, state: c.PacketState) -> None:
        """See `Steps`."""
        from foretrain.network.packet import window_kernel

        window_kernel.load(state.memory, state.far)

    def run(self, state: c.PacketState, size: int) -> int:
        """See `Steps`."""
        from foretrain.network.packet import window_kernel

        return window_kernel.run(state.memory, state.real, state.far, state.buffer, state.trace, size)


class Events:
    """Event after event."""

    size = 1 << 16

    def load(self, state: c.PacketState) -> None:
        """See `Steps`."""
        from foretrain.network.packet import event_kernel

        event_kernel.load(state.memory, state.event)

    def run(self, state: c.PacketState, size: int) -> int:
        """See `Steps`."""
        from foretrain.network.packet import event_kernel

        return event_kernel.run(state.memory, state.real, state.event, state.trace, size)


class Slices:
    """Runs a kernel for about a tenth of a second at a time; what is simulated does not depend on it."""

    def __init__(self, kernel: Steps) -> None:
        self._kernel, self._size = kernel, kernel.size

    def load(self, state: c.PacketState) -> None:
        """See `Steps`."""
        self._kernel.load(state)

    def run(self, state: c.PacketState) -> int:
        """One slice; why it ended."""
        began = time.perf_counter()
        why = self._kernel.run(state, self._size)
        took = time.perf_counter() - began
        if took > _LONG:
            self._size = max(self._size // 2, 1)
        elif took < _SHORT and why == c.BREATH:
            self._size = min(2 * self._size, _MOST)
        return why


def chosen(kernel: Kernel, shortest: Time) -> Slices:
    """The kernel where the shortest link takes so long.

    Raises:
        ConfigError: windows were asked for, and a link takes no time.
    """
    if kernel == "windows" and shortest < 1:
        raise ConfigError("kernel", "windows", "cannot be where a link takes no time", "use 'auto'")
    return Slices(Windows() if kernel == "windows" or (kernel == "auto" and shortest >= _LEAST) else Events())
