"""Uncertainty of the forecast gain of one schedule over another.

Two things are uncertain. The forecast itself: what the simulator leaves out. And what it is given: rate, θ, latency and
computation were measured, or assumed, with a spread. The first counts for either schedule; of the second one at a time
is changed by one standard deviation *for both*, for a slower link slows both, and what the gain then changes by counts.
All of it adds up in quadrature. So does what updating beside the computation gains: the simulator takes room for it for
granted, and a device that is busy has none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from foretrain.network import Cluster, Place
from foretrain.planner.backends import engine_of
from foretrain.planner.candidate_search import Candidate
from foretrain.planner.search import forecaster
from foretrain.schedule import POLICIES
from foretrain.units import Time


@dataclass(frozen=True, slots=True)
class GainUncertainty:
    """Relative standard deviations of a forecast and of its inputs.

    Attributes:
        forecast: of an iteration, whatever it is given: the median error of forecasts ÷ 0.67.
        rate: of the bytes per second that a link carries.
        overhead: of θ and of the floor.
        latency: of the latency.
        compute: of the time to compute.
    """

    forecast: float = 0.015
    rate: float = 0.03
    overhead: float = 0.2
    latency: float = 0.2
    compute: float = 0.03


NONE = GainUncertainty(0.0, 0.0, 0.0, 0.0, 0.0)
"""Exact forecasts: only the room for updates is uncertain."""
ALL_REDUCE = GainUncertainty()
"""Steps in the lab: forecasts off by 1.0 % in the median."""
SERVED = GainUncertainty(forecast=0.016, rate=0.12, overhead=0.4, latency=0.4)
"""Over a parameter server forecasts are off by 1.1 % in the median where communication is hidden. Where it is not they
are off by 9 %, alike for all schedules: workers that push at once get 10 to 15 % less, messages cost 0.2 to 0.5 ms."""
CROWDED = 0.061
"""Of forecasts where communication takes the cores that compute: off by 4.1 % in the median."""


def usual(place: Place, crowding: float = 0.0) -> GainUncertainty:
    """Return the uncertainty of forecasts on ``place``; ``crowding`` is how busy the communicating cores are, 0 to
    1.
    """
    found = ALL_REDUCE if engine_of(place) == "all_reduce" else SERVED
    return replace(found, forecast=max(found.forecast, crowding * CROWDED))


def uncertainty(baseline: Candidate, one: Candidate, doubts: tuple[GainUncertainty, GainUncertainty]) -> float:
    """Return the standard deviation of the gain of ``one`` over ``baseline``, as a share of an iteration.

    Args:
        baseline: simulated, as is ``one``.
        one: what may be chosen.
        doubts: of either.
    """
    assert baseline.time is not None
    assert one.time is not None
    gain = baseline.time / one.time
    parts = [gain * math.hypot(doubts[0].forecast, doubts[1].forecast)]
    for slow, fast in zip(_worse(baseline, doubts[0]), _worse(one, doubts[1]), strict=True):
        parts.append(slow / fast - gain)
    if not POLICIES[one.schedule.name].barrier:
        beside = max(0, min(one.workload.update, baseline.time - one.time))
        parts.append(baseline.time / (one.time + beside) - gain)
    return math.hypot(*parts)


def _worse(one: Candidate, doubt: GainUncertainty) -> Iterator[Time]:
    """Yield the iteration time with each parameter worse by one standard deviation."""
    for place, factor in (
        (one.place.scaled(1 / (1 + doubt.rate)) if doubt.rate else one.place, 1.0),
        (_changed(one.place, "overhead", doubt.overhead), 1.0),
        (_changed(one.place, "latency", doubt.latency), 1.0),
        (one.place, 1 + doubt.compute),
    ):
        if place is one.place and factor == 1:
            assert one.time is not None
            yield one.time
        else:
            yield forecaster(one.workload.slowed(factor), place)(one.schedule)


def _changed(place: Place, parameter: str, share: float) -> Place:
    """Return ``place`` with more of θ, or of latency."""
    if not share:
        return place
    if isinstance(place, Cluster):
        fields = ("overhead", "floor") if parameter == "overhead" else (parameter,)
        more = {field: round(getattr(place, field) * (1 + share)) for field in fields}
        return replace(place, **more) if any(more.values()) else place
    # A topology's latency is that of each of its links; its software's cost is in θ.
    return place.changed("overhead", round(place.overhead * (1 + share))) if parameter == "overhead" else place
