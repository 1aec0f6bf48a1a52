"""Copies between host and GPU: the link's rate from pinned memory, the host's own copy first from pageable memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from foretrain.units import MICROSECOND, SECOND, Time

if TYPE_CHECKING:
    from foretrain.device.gpu import Device

COPY_LATENCY: Time = 10 * MICROSECOND
"""Of a copy of a few bytes, from the call to its end (NVIDIA's bandwidthTest on PCIe machines: 8 to 12 us)."""

PAGEABLE_RATE = 6e9
"""Bytes per second through the driver's staging buffer, which one core of the host fills (estimate: 4 to 8 GB/s)."""


def copy_time(device: Device, size: int, pinned: bool) -> Time:
    """Picoseconds of a copy of ``size`` bytes in either direction."""
    rate = device.host_rate if pinned else min(PAGEABLE_RATE, device.host_rate)
    return COPY_LATENCY + math.ceil(size / rate * SECOND)
