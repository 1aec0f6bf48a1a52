"""Transport with bounded loss (DLCP, arXiv 2008.08445): a step may be over when 1 − p of its bytes are there.

wire.h, engine.cpp    packets, and the thread that sends and receives them
congestion            rate and timers: the packet simulation's own functions
early_close           when an array is over, as LTP has it
optireduce            the same, as OptiReduce has it; and its transform
plans                 who sends what to whom, stage by stage
engine                owner of the thread and its sockets
collectives           operations on arrays
ledger                what may be lost, and was
guard                 when an automatic tolerance rises, and when it goes back to zero
server                a process that sums, for ``over="ps"``, and may update parameters
server_state          what ranks tell such a server, and ask it, over TCP

Here is what others need to know of it: hints and losses, and the marks of packets for switches.

# Note [Marks]
Codes are those of assured forwarding (RFC 2597), which switches know: AF4x for the most urgent quarter by the policy,
to AF1x; AFx3, the highest drop precedence, for what may be dropped, and AFx1, capable of ECN, for the rest. So strict
priority by class, and WRED by precedence with ECN, are all that has to be configured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CLASSES = 8
"""Classes of urgency; 0 goes first. Two share a code."""
HISTORY = 32
"""Numbers that a rule of ending keeps of an array."""
NEVER = 1 << 62
"""Nanoseconds that do not pass."""
NO_EXTENTS = np.zeros((0, 2), np.int64)
"""Extents of no bytes at all, as `Hint` has them."""


def service_of(urgency: int, precedence: int) -> int:
    """Return the type of service with the code AF(4 − urgency)(precedence), without ECN."""
    return (8 * (4 - urgency) + 2 * precedence) << 2


SERVICES = tuple((service_of(of // 2, 3), service_of(of // 2, 1)) for of in range(CLASSES))
"""Type of service of what may be dropped, and of the rest, for each class."""


@dataclass(frozen=True, slots=True)
class Hint:
    """Urgency and vital parts of an array, for a transport that may lose some of it.

    Attributes:
        slot: number of the array, the same in every step.
        urgency: 0 for what the policy sends first, towards 1 for what it sends last.
        tolerance: share of it that may be lost; None leaves that to the collectives.
        vital: (n, 2), first byte and the one behind the last of what may not be lost, ascending.
        important: (n, 2), the same of what may be lost, but not dropped first by switches.
        tensors: (n, 3), tensor, and its first element and the one behind the last of what there is of it, in the
            array's order; for a server that updates.
    """

    slot: int = 0
    urgency: float = 0.0
    tolerance: float | None = None
    vital: NDArray[np.int64] = field(default_factory=lambda: NO_EXTENTS)
    important: NDArray[np.int64] = field(default_factory=lambda: NO_EXTENTS)
    tensors: NDArray[np.int64] | None = None


class Loss(NamedTuple):
    """Bytes that did not come.

    Attributes:
        place: first byte, of the values.
        size: bytes.
        source: rank whose contribution, or partial sum, they were; N of the parameters that a server sends.
    """

    place: int
    size: int
    source: int
