"""What a round through servers costs between these hosts; see `foretrain.lab.calibration`.

A message of each size is pushed by all workers at once, and its sum comes back, with several under way so that both
directions of every link are busy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

from foretrain.comm.ps.client.connection import Links
from foretrain.comm.ps.client.probing import PushProbe, depth
from foretrain.comm.ps.frames import FrameKind, Header
from foretrain.lab.calibration import nominal
from foretrain.lab.messages import CalibrationSample
from foretrain.network import Cluster
from foretrain.units import MILLISECOND, NANOSECOND, SECOND

SIZES = tuple(1 << power for power in (12, 14, 16, 18, 20))
"""4 KiB to 1 MiB, the largest message with a sum."""
_FEW, _MANY = 8, 64
_TURNS = 3
_FAREWELL = 2.0


def probe(
    links: Links,
    called: Cluster,
    job: str,
    *,
    patience: float,
    sizes: Sequence[int] = SIZES,
    budget: float = 4.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[CalibrationSample, ...]:
    """Times rounds through the servers; every worker calls it, and each gets its own times.

    Only the smallest is timed alone, too: what it takes longer than one of several is latency.

    Args:
        links: to every server; they are told goodbye, and closed.
        called: the links at their nominal rate; only to choose how often to repeat, alike on every worker.
        job: its name, the same on all.
        patience: seconds after which a round that does not come back is stuck.
        sizes: bytes, ascending.
        budget: seconds for everything, about.
        progress: told how many of all cases are done.
    """
    cases = [(sizes[0], 1), *((size, depth(size)) for size in sizes)]
    found: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    share = budget / _TURNS / len(cases)
    try:
        links.establish(patience)
        rounds = PushProbe(links, called.workers, job, 0, patience)
        rounds.series(sizes[-1], _FEW, depth(sizes[-1]))
        for turn in range(_TURNS):
            for place, (size, under_way) in enumerate(cases):
                expected = (nominal(called) * size + MILLISECOND) / SECOND
                count = min(_MANY, max(_FEW, math.floor(share / expected)))
                found[size, under_way].append(rounds.series(size, count, under_way))
                progress(turn * len(cases) + place + 1, _TURNS * len(cases))
        for connection in links.connections:
            connection.send(Header(FrameKind.BYE))
    finally:
        links.close(_FAREWELL)
    return tuple(CalibrationSample(*case, round(median(times) * NANOSECOND)) for case, times in found.items())
