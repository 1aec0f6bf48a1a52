"""How much waits in queues, looked at every so many windows. Both kernels look before anything of that time happens."""

from __future__ import annotations

from foretrain.network.packet import state as c
from foretrain.network.packet.jit import inside


@inside
def look(m, trace, window):
    """Notes what waits as ``window`` begins, if it is time; False where there is no room for that.

    Where nothing happens nobody looks: what was not noted is as in the next row.
    """
    sample = window // m[c.TRACE_EVERY]
    if sample <= m[c.LAST_TRACE]:
        return True
    row = m[c.TRACED]
    if row == len(trace):
        return False
    trace[row, 0] = sample
    for k in range(m[c.WATCHED], m[c.LAST_WATCHED]):
        trace[row, 1 + k - m[c.WATCHED]] = m[m[k] + c.TOTAL]
    m[c.TRACED] = row + 1
    m[c.LAST_TRACE] = sample
    return True
