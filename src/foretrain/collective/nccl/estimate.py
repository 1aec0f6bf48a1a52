"""NCCL's own estimate of its protocols: where it leaves LL and LL128, fitted or not.

NCCL picks the protocol with the least ``latency + size / bandwidth`` by constants that are compiled in
(``ncclTopoTuneModel`` in its src/graph/tuning.cc, here as of 2.27, on NVLink). The constants are not measurements:
on an A100, two ranks gather 1 MiB in 20 µs by LL, and 2 MiB in 38 µs by Simple, because NCCL believes that LL were
slower from 1.3 MB on. A forecast must leave where NCCL leaves, or it misses the step.

Only facts are taken from there, and only for one server. What is left out: trees, which this estimate never prefers
inside a server, its correction of trees by size, and user settings.

The ring's base and hop latencies in microseconds are NCCL's for NVLink; the rates are in `Generation.estimated_rate`
and its neighbours. That of NVLS is not NCCL's but such that NVLS begins at the rank counts where it is measured to.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from foretrain.collective.nccl.bandwidth import ROUNDS
from foretrain.collective.nccl.generation import Generation
from foretrain.collective.plan import Operation
from foretrain.units import MICROSECOND, SECOND

Protocol: TypeAlias = Literal["LL", "LL128", "Simple"]
"""LL sends 4 bytes of data with each 4 of flag, LL128 120 of 128, Simple whole chunks with one flag each."""

BASE: dict[Protocol, float] = {"LL": 6.6, "LL128": 14.0, "Simple": 8.4}
HOP: dict[Protocol, float] = {"LL": 0.6, "LL128": 1.9, "Simple": 3.4}
NVLS_LATENCY = 25.0
"""Microseconds; the fit takes no less, or NVLS would seem fit for the smallest sizes."""
NVLS_FACTOR = 5 / 6
"""Of the bus bandwidth, what NVLS gets."""

LL128_PAYLOAD = 0.92
LL_PAYLOAD = 0.5


def offered(
    operation: Operation, size: int, ranks: int, generation: Generation, *, nvls: bool = False, part: float = 1.0
) -> tuple[Protocol, ...]:
    """Protocols that NCCL would still use at ``size`` in one server, from the lightest on; with NVLS it has no third.

    A light protocol is out once a heavier one is estimated faster, and stays out, as the heavier has more bandwidth.
    Where the switch can reduce (``nvls``) its estimate is always ahead of LL128 and of the ring's Simple; what is left
    is LL, for a time, and Simple, which then means NVLS. ``part`` of the generation's link is what the product has.
    """
    steps = ROUNDS.get(operation, 1) * (ranks - 1)
    bus = generation.estimated_rate * part
    rates: dict[Protocol, float] = {
        "LL": min(generation.estimated_ll, bus * LL_PAYLOAD),
        "LL128": min(generation.estimated_ll128, bus * LL128_PAYLOAD),
        "Simple": bus,
    }
    time: dict[Protocol, float] = {
        protocol: (BASE[protocol] + HOP[protocol] * steps) * MICROSECOND + size * steps / ranks / rate * SECOND
        for protocol, rate in rates.items()
    }
    if nvls:
        by_switch = NVLS_LATENCY * MICROSECOND + size / (generation.estimated_nvls * part * NVLS_FACTOR) * SECOND
        return ("LL", "Simple") if time["LL"] < by_switch else ("Simple",)
    if not generation.has_ll128:
        del time["LL128"]
    order = tuple(time)
    return tuple(p for i, p in enumerate(order) if all(time[p] < time[other] for other in order[i + 1 :]))
