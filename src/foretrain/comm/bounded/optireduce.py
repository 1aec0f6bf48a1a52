"""OptiReduce (arXiv 2310.06993): timeouts that adapt, and a Hadamard transform that spreads what is lost.

Its Transpose AllReduce is ``over="transpose"``. The adaptive timeout ends an array t_B after its first packet; or
earlier, x % of t_C after one of the last hundredth of its packets has come, which says that all has been sent. Nothing
is sent again but what is vital. The first times of an array wait for all of it. Then t_B is their 95th percentile; t_C
follows what arrays take: the time of one that came whole, t_B of one that timed out, and of others their time over the
share that came. x doubles where more is lost than a thousandth, and falls by one where less than a ten-thousandth.

The transform: signs by a hash of a seed, then Walsh and Hadamard's matrix over √n. It is orthogonal and linear, so that
the sum of transforms is transformed back at the end, and a packet that is lost is a small error of all values. Of
lengths that are no powers of two, the first 2^k elements are transformed, and then the last 2^k, with other signs.

Departures: OptiReduce measures t_B over TCP, and all ranks share it and t_C; here each array from each rank has its
own, from bounded loss that waits, so that no messages are needed. Time begins with the first packet, so that a rank
that computes longer loses nothing for that. Copies of sums lose nothing, or replicas would drift apart. How many ranks
send to one at once is left to congestion control. The transform is on or off, and not switched on when much is lost.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from foretrain.comm.bounded import HISTORY, NEVER
from foretrain.network.jit import entry, inside, packet_callback

FIRST = 20
"""Times that an array comes whole, of which t_B is the 95th percentile."""
BEGIN, LEAST, MOST = 10, 1, 50
"""Percent: x at first, and its bounds."""
COUNT, TIMES, BOUND, EXPECTED, GRACE = 0, 1, FIRST + 1, FIRST + 2, FIRST + 3
"""Numbers of a history: arrays so far, the ns of the first ones, t_B, t_C and x."""
_HISTORY = types.CPointer(types.int64)


def callbacks() -> NDArray[np.int64]:
    """Return engine.cpp's ``Ending``: two addresses, and that what is missing is not sent again."""
    return np.array([over.address, note.address, 0])


@packet_callback(types.int64(_HISTORY, types.int64, types.int64))
def over(history: Any, enough: Any, last: Any) -> Any:
    """Return the ns since its first packet at which an array is over, ``last`` after which all was sent, or −1."""
    m = carray(history, HISTORY)
    if m[COUNT] < FIRST:
        return NEVER
    if last < 0:
        return m[BOUND]
    return min(m[BOUND], last + m[EXPECTED] * m[GRACE] // 100)


@packet_callback(types.void(_HISTORY, types.int64, types.int64, types.int64))
def note(history: Any, took: Any, got: Any, size: Any) -> None:
    """Note an array that was over after ``took`` ns with ``got`` of ``size`` bytes."""
    m = carray(history, HISTORY)
    if m[COUNT] < FIRST:
        k = m[COUNT]  # sorted by insertion
        while k > 0 and m[TIMES + k - 1] > took:
            m[TIMES + k] = m[TIMES + k - 1]
            k -= 1
        m[TIMES + k] = took
        m[COUNT] += 1
        m[BOUND] = m[TIMES + (95 * FIRST + 99) // 100 - 1]
        m[EXPECTED], m[GRACE] = m[TIMES + FIRST // 2], BEGIN
        return
    observed = took
    if got < size:
        observed = m[BOUND] if took >= m[BOUND] or got == 0 else min(took * size // got, m[BOUND])
    m[EXPECTED] = (19 * observed + m[EXPECTED]) // 20
    if 1_000 * (size - got) > size:
        m[GRACE] = min(2 * m[GRACE], MOST)
    elif 10_000 * (size - got) < size:
        m[GRACE] = max(m[GRACE] - 1, LEAST)


@inside
def _change_signs(values: Any, seed: Any) -> None:
    for i in range(len(values)):
        x = (np.uint64(i) + np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
        if x >> np.uint64(63):
            values[i] = -values[i]


@inside
def _hadamard(values: Any, first: Any, count: Any) -> None:
    """Transform ``count`` elements, a power of two, from the ``first`` on."""
    width = 1
    while width < count:
        for begin in range(first, first + count, 2 * width):
            low, high = values[begin : begin + width], values[begin + width : begin + 2 * width]
            for i in range(width):
                one, other = low[i], high[i]
                low[i], high[i] = one + other, one - other
        width *= 2
    scale = values.dtype.type(1.0 / np.sqrt(count))
    for i in range(first, first + count):
        values[i] *= scale


@entry
def transform(values: Any, seed: Any, back: Any) -> None:
    """Replace floats, one-dimensional, by their randomized Hadamard transform, or undo that; n log n.

    Args:
        values: of float32 or float64, contiguous.
        seed: of the signs.
        back: whether it is undone.
    """
    count, power = len(values), 1
    while 2 * power <= count:
        power *= 2
    if not back:
        _change_signs(values, 2 * seed)
        _hadamard(values, 0, power)
        if count > power:
            _change_signs(values, 2 * seed + 1)  # the matrix is its own inverse: another would undo most of it
            _hadamard(values, count - power, power)
    else:
        if count > power:
            _hadamard(values, count - power, power)
            _change_signs(values, 2 * seed + 1)
        _hadamard(values, 0, power)
        _change_signs(values, 2 * seed)
