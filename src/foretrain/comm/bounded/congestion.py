"""Congestion control and timers of the bounded transport: the simulated transport's own functions, compiled for C.

One scheduler in two worlds, for a transport: `foretrain.network.packet.transports` decides in the packet simulation and
here how much may be under way, at what rate, and when to probe. The engine keeps one flow per peer, a row of the
simulator's memory, and calls these functions where the simulator would. Time is in ps in both.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numba import types
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from foretrain.network.jit import packet_callback
from foretrain.network.packet import state as c
from foretrain.network.packet.host_tx import measure, timeout
from foretrain.network.packet.transports import rates
from foretrain.network.packet.transports.bounded import probe_delay
from foretrain.network.packet.transports.transport import AIMD, Bounded
from foretrain.units import MILLISECOND, SECOND

_COLUMNS = c.FLOW_COLUMNS + c.PARAMETER_COLUMNS
"""Of a flow's memory: its row, then its transport's parameters."""
_FIRST_SILENCE = 200 * MILLISECOND
"""Before a round trip is known; TCP waits for a second then (RFC 6298)."""
_WHOLE, _REAL = types.CPointer(types.int64), types.CPointer(types.float64)
_NOTHING, _NUMBER = types.void, types.int64


def flow(transport: Bounded, peak: float) -> NDArray[np.int64]:
    """Return the memory of one flow.

    Args:
        transport: its settings.
        peak: bytes/s of the slowest link on its way, where rates begin and which they never exceed.
    """
    memory = np.zeros(_COLUMNS, np.int64)
    real = memory.view(np.float64)
    memory[c.TRANSPORT], memory[c.FULL] = c.FLOW_COLUMNS, transport.payload + transport.header
    real[c.FLOW_COLUMNS :] = transport.row()
    real[c.PEAK] = peak / SECOND
    _begin.ctypes(memory.ctypes.data_as(_Whole), real.ctypes.data_as(_Real))
    return memory


def callbacks() -> NDArray[np.int64]:
    """Return the addresses of the functions, in the order of engine.cpp's ``Law``."""
    law = _room, _sent, _heard, _lost, _settled, _probe_after, _silence, _interval
    return np.array([each.address for each in law])


_Whole, _Real = ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_double)


@packet_callback(_NOTHING(_WHOLE, _REAL))
def _begin(whole: Any, real: Any) -> None:
    """Initialise a flow."""
    m, x = carray(whole, _COLUMNS), carray(real, _COLUMNS)
    rates.start(m, x, 0)


@packet_callback(_NUMBER(_WHOLE, _REAL))
def _room(whole: Any, real: Any) -> Any:
    """Return how many packets may be sent now."""
    m, x = carray(whole, _COLUMNS), carray(real, _COLUMNS)
    if rates.law(m, x, 0) != AIMD:
        return int(x[m[c.TRANSPORT] + c.MOST]) - (m[c.SENT_PACKETS] - m[c.HEARD_OF])
    return int(x[c.WINDOW]) - (m[c.SENT_PACKETS] - m[c.HEARD_OF])


@packet_callback(_NOTHING(_WHOLE, _REAL, _NUMBER))
def _sent(whole: Any, real: Any, packets: Any) -> None:
    """Count packets that were sent."""
    m = carray(whole, _COLUMNS)
    m[c.SENT_PACKETS] += packets


@packet_callback(_NOTHING(_WHOLE, _REAL, _NUMBER, _NUMBER, _NUMBER, _NUMBER))
def _heard(whole: Any, real: Any, number: Any, count: Any, marked: Any, trip: Any) -> None:
    """Process the acknowledgement of ``count`` packets up to ``number``, some ``marked``, after a round ``trip``."""
    m, x = carray(whole, _COLUMNS), carray(real, _COLUMNS)
    measure(m, x, 0, trip)
    window, flying = x[c.WINDOW], m[c.SENT_PACKETS] - m[c.HEARD_OF]
    for k in range(count):
        rates.on_ack(m, x, 0, max(number - (count - 1 - k), 0), k < marked, trip)
    # A window that was not full says nothing of the path (RFC 7661); simulated flows always have something to send.
    x[c.WINDOW] = min(x[c.WINDOW], max(window, 2.0 * flying))
    m[c.HEARD_OF] = max(m[c.HEARD_OF], number + 1)
    m[c.TRIES] = 0


@packet_callback(_NOTHING(_WHOLE, _REAL))
def _lost(whole: Any, real: Any) -> None:
    """Slow down: nothing was heard for long."""
    m, x = carray(whole, _COLUMNS), carray(real, _COLUMNS)
    rates.on_loss(m, x, 0)
    m[c.HEARD_OF] = m[c.SENT_PACKETS]


@packet_callback(_NOTHING(_WHOLE, _REAL))
def _settled(whole: Any, real: Any) -> None:
    """Count nothing as under way."""
    m = carray(whole, _COLUMNS)
    m[c.HEARD_OF] = m[c.SENT_PACKETS]


@packet_callback(_NUMBER(_WHOLE, _REAL, _NUMBER))
def _probe_after(whole: Any, real: Any, tries: Any) -> Any:
    """Return the ps from the last packet to a probe, after so many ``tries`` in a row."""
    m, x = carray(whole, _COLUMNS), carray(real, _COLUMNS)
    m[c.TRIES] = tries
    return int(probe_delay(m, x, 0))


@packet_callback(_NUMBER(_WHOLE, _REAL))
def _silence(whole: Any, real: Any) -> Any:
    """Return the ps without an acknowledgement after which all that is under way counts as lost.

    Longer than a round trip, however long that is. An early probe does little harm; this would close the window.
    """
    m, x = carray(whole, _COLUMNS), carray(real, _COLUMNS)
    if x[c.SMOOTHED] == 0.0:
        return int(_FIRST_SILENCE)
    return max(timeout(m, x, 0), 2 * int(probe_delay(m, x, 0)))


@packet_callback(_NUMBER(_WHOLE, _REAL, _NUMBER))
def _interval(whole: Any, real: Any, size: Any) -> Any:
    """Return the ps that ``size`` bytes take at the rate; 0 where a window sets it."""
    m, x = carray(whole, _COLUMNS), carray(real, _COLUMNS)
    if rates.law(m, x, 0) == AIMD:
        return 0
    return int(size / x[c.PACE_RATE])
