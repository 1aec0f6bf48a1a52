"""Bus bandwidth, as nccl-tests defines it (PERFORMANCE.md there): the rate of the links, whatever the rank count."""

from __future__ import annotations

from foretrain.collective.plan import Operation
from foretrain.units import SECOND, Time

ROUNDS: dict[Operation, int] = {
    "all_reduce": 2,
    "reduce_scatter": 1,
    "all_gather": 1,
    "all_to_all": 1,
}
"""How often all but one of a rank's N blocks must cross its link; a broadcast moves all N, once."""


def bus_factor(operation: Operation, ranks: int) -> float:
    """Bytes that must leave a rank, per byte of size: 2(N−1)/N, (N−1)/N, or 1 for a broadcast."""
    return ROUNDS[operation] * (ranks - 1) / ranks if operation in ROUNDS else 1.0


def bus_bandwidth(operation: Operation, size: int, ranks: int, time: Time) -> float:
    """Bytes/s on the links of a collective of ``size`` bytes (as in `Plan.size`) that took ``time``."""
    return bus_factor(operation, ranks) * size * SECOND / time
