"""A network that programs come to while time passes: what carries them, and the handle of one that runs.

`foretrain.network.ideal`, `foretrain.network.fluid` and `foretrain.network.packet.online_simulator` are carriers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from foretrain.network.program import Program
from foretrain.units import Time


@dataclass(eq=False, slots=True)
class ProgramHandle:
    """A program in the network; the handle that `NetworkSimulator.add` returns.

    Attributes:
        program: what was added.
        added: when, ps.
        end: when its last flow ended, ps, rounded up; None while it runs.
        finish: when each flow ended, float64 ps; NaN until all have.
        cancelled: whether it was.
    """

    program: Program
    added: Time
    end: Time | None = None
    cancelled: bool = False
    finish: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    _first: int = 0
    _index: int = 0

    @property
    def _range(self) -> tuple[int, int]:
        return self._first, self._first + len(self.program)


class NetworkSimulator(Protocol):
    """What simulates a network, at any fidelity."""

    @property
    def now(self) -> Time:
        """The present, ps."""
        ...

    @property
    def running(self) -> tuple[ProgramHandle, ...]:
        """The programs that have not completed, in the order in which they came."""
        ...

    def add(self, program: Program, at: Time | None = None) -> ProgramHandle:
        """Starts ``program`` now, or at ``at``, up to which time then passes first.

        Releases in the program count from the network's time 0.
        """
        ...

    def advance(self, until: Time | None = None, *, stop: bool = False) -> tuple[ProgramHandle, ...]:
        """Lets time pass to ``until``, or until everything is done; returns what completed, in order.

        Args:
            until: ps; None for as long as anything can happen.
            stop: whether to stop where the first program completes.

        Raises:
            StallError: without ``until``, if what is left can never complete.
        """
        ...

    def predict(self, handle: ProgramHandle) -> Time:
        """When ``handle`` would complete if nothing else came or changed, ps."""
        ...

    def next_completion(self) -> Time | None:
        """When the next program would complete if nothing else came or changed, ps; None if none runs."""
        ...

    def cancel(self, handle: ProgramHandle) -> None:
        """Takes ``handle`` out of the network, now. What it has sent stays sent."""
        ...
