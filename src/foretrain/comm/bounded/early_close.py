"""Early Close (LTP, arXiv 2305.04279): how long an array waits for all of itself, and how long for a share.

    before the LT threshold    it is over when all has come; what is missing is sent again
    from there on              when 1 − p of it has come
    from the deadline on       with what has come, but for what is vital

The LT threshold is what the fastest array took that came whole in the epoch before; the deadline is a slack later.
LTP's Bubble Filling is what this transport does in any case: packets say their offset, and what is lost is zero.

Departures: LTP begins with the time that bandwidth and round trip promise; here the first epoch waits for everything.
An epoch is `EPOCH` times that the same array comes from the same rank, since a transport knows no other. Where nothing
came whole in one, the next waits for everything, or a network that becomes slower would be measured no more. LTP's
deadline is that of the slowest of all links; here each array has its own. `EPOCH` and `SLACK` are ours.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from foretrain.comm.bounded import HISTORY, NEVER
from foretrain.network.jit import packet_callback

EPOCH = 16
"""Times that an array comes between two thresholds."""
SLACK = 30_000_000
"""Nanoseconds from the threshold to the deadline."""
COUNT, FASTEST, THRESHOLD = range(3)
"""Numbers of a history: arrays of this epoch; ns of the fastest that came whole, and the threshold, or 0 for none."""
_HISTORY = types.CPointer(types.int64)


def callbacks() -> NDArray[np.int64]:
    """Return engine.cpp's ``Ending``: two addresses, and that what is missing is sent again."""
    return np.array([over.address, note.address, 1])


@packet_callback(types.int64(_HISTORY, types.int64, types.int64))
def over(history: Any, enough: Any, last: Any) -> Any:
    """Return the ns since its first packet at which an array is over that is ``enough`` but not all."""
    threshold = carray(history, HISTORY)[THRESHOLD]
    if threshold == 0:
        return NEVER
    return threshold if enough else threshold + SLACK


@packet_callback(types.void(_HISTORY, types.int64, types.int64, types.int64))
def note(history: Any, took: Any, got: Any, size: Any) -> None:
    """Note an array that was over after ``took`` ns with ``got`` of ``size`` bytes."""
    m = carray(history, HISTORY)
    if got == size and (m[FASTEST] == 0 or took < m[FASTEST]):
        m[FASTEST] = max(took, 1)
    m[COUNT] += 1
    if m[COUNT] == EPOCH:
        m[THRESHOLD] = m[FASTEST]
        m[COUNT] = m[FASTEST] = 0
