"""Conversion between 16-bit floating-point numbers and float32 in compiled loops: numpy's take several times as long.

Widening is exact. Rounding is to nearest, ties to even; what is too large becomes infinite. numba takes longer to
import than a server to start, which is why this is its own file: it is imported where 16-bit gradients come.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

Bits = NDArray[np.uint16]
Floats = NDArray[np.float32]

_PUSHED: Final = types.Array(types.uint16, 1, "C", readonly=True, aligned=False)
"""Type of bytes in a received message: read-only, at any address."""
_OPTIONS: Final[dict[str, Any]] = {"cache": True, "nogil": True, "boundscheck": False}
_TO_FLOAT: Final = np.float32(2.0**112)
"""The ratio of a float32's value to that of a float16 with the same bits, 13 places to the left."""
_INFINITE: Final = np.float32(2.0**16)
"""Value of float16's infinity read that way; that of a NaN is no smaller."""
_HALF: Final = np.float32(0.5)
"""Added to a number below 2^-14 it leaves that number's float16 bits in the last bits of the sum."""


@njit(types.void(_PUSHED, types.float32[::1]), **_OPTIONS)
def widen_float16(halves: Bits, wide: Floats) -> None:
    """Convert ``halves``, n, into ``wide``, n."""
    bits = wide.view(np.uint32)
    for i in range(halves.size):
        bits[i] = np.uint32(halves[i] & np.uint32(0x7FFF)) << np.uint32(13)
    for i in range(halves.size):
        wide[i] *= _TO_FLOAT
    for i in range(halves.size):
        special = np.uint32(0x7F800000) if wide[i] >= _INFINITE else np.uint32(0)
        bits[i] |= special | (np.uint32(halves[i] & np.uint32(0x8000)) << np.uint32(16))


@njit("void(float32[::1], uint16[::1])", **_OPTIONS)
def narrow_float16(wide: Floats, halves: Bits) -> None:
    """Convert ``wide``, n, which is overwritten, into ``halves``, n."""
    bits = wide.view(np.uint32)
    for i in range(wide.size):
        sign = (bits[i] >> np.uint32(16)) & np.uint32(0x8000)
        size = bits[i] & np.uint32(0x7FFFFFFF)
        odd = (size >> np.uint32(13)) & np.uint32(1)
        # Exponent 15 instead of 127, and half a unit, less a bit where the last is even already.
        normal = (size - np.uint32(112 << 23) + np.uint32(0xFFF) + odd) >> np.uint32(13)
        infinite = size >= np.uint32(0x477FF000)
        nothing = size > np.uint32(0x7F800000)
        special = np.uint32(0x7E00) if nothing else np.uint32(0x7C00)
        halves[i] = np.uint16((special if infinite else normal & np.uint32(0x7FFF)) | sign)
        small = size < np.uint32(0x38800000)
        bits[i] = size if small else np.uint32(0x7F800000)
    for i in range(wide.size):
        wide[i] += _HALF
    for i in range(wide.size):
        small = bits[i] < np.uint32(0x7F800000)
        fine = np.uint16(bits[i] - np.uint32(0x3F000000)) | (halves[i] & np.uint16(0x8000))
        halves[i] = fine if small else halves[i]


@njit(types.void(_PUSHED, types.float32[::1]), **_OPTIONS)
def widen_bfloat16(halves: Bits, wide: Floats) -> None:
    """Convert ``halves``, n, into ``wide``, n."""
    bits = wide.view(np.uint32)
    for i in range(halves.size):
        bits[i] = np.uint32(halves[i]) << np.uint32(16)


@njit("void(float32[::1], uint16[::1])", **_OPTIONS)
def narrow_bfloat16(wide: Floats, halves: Bits) -> None:
    """Convert ``wide``, n, into ``halves``, n."""
    bits = wide.view(np.uint32)
    for i in range(wide.size):
        odd = (bits[i] >> np.uint32(16)) & np.uint32(1)
        # Rounding could carry a NaN's bits into infinity, or beyond.
        nothing = (bits[i] & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        rounded = (bits[i] + np.uint32(0x7FFF) + odd) >> np.uint32(16)
        halves[i] = np.uint16(np.uint32(0x7FC0) if nothing else rounded)
