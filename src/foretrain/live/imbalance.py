"""Step time of a script against how uneven the loads of its experts are: further simulations, with drawn loads.

Experts change what is launched, exchanged and allocated, so every point is a simulation of the whole script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from foretrain.errors import ForetrainError
from foretrain.live.rank_processes import OutOfMemory
from foretrain.live.simulate import Simulated
from foretrain.units import Time

SIGMAS = (0.0, 0.2, 0.4, 0.8)
"""Standard deviations of the loads' logarithms."""
SEEDS = 3
"""Draws for each of them."""
DRAWS = tuple((sigma, seed) for sigma in SIGMAS for seed in range(SEEDS if sigma else 1))
"""Spreads and seeds of a curve, by ascending spread: loads without spread are the same with all seeds."""
COUNT = len(DRAWS)
"""Simulations of a curve."""


def drawn_loads(sigma: float, seed: int) -> str:
    """Return the notation of loads with this spread and seed; see `foretrain.live.device.settings.ExpertLoads`."""
    return f"lognormal({sigma},{seed})"


@dataclass(frozen=True, slots=True)
class ImbalancePoint:
    """One simulation.

    Attributes:
        sigma, seed: of the loads, see `foretrain.live.device.settings.ExpertLoads`.
        time: of an iteration, ps; None where it failed.
        busiest_expert, busiest_rank: as of `foretrain.live.routed_loads.RoutedLoads`.
        failure: why there is no time; empty where there is one.
    """

    sigma: float
    seed: int
    time: Time | None
    busiest_expert: float | None = None
    busiest_rank: float | None = None
    failure: str = ""


def imbalance_points(run: Callable[[str], Simulated]) -> Iterator[ImbalancePoint]:
    """Yield the points of a curve, by ascending spread; none where the script has no routers.

    ``run`` simulates the script with the loads it is given as text. A simulation that runs out of memory, or fails
    otherwise, is a point without a time.
    """
    for sigma, seed in DRAWS:
        try:
            done = run(drawn_loads(sigma, seed))
        except ForetrainError as error:
            failure = "out of memory" if isinstance(error, OutOfMemory) else str(error).splitlines()[0]
            yield ImbalancePoint(sigma, seed, None, failure=failure)
            continue
        loads = done.loads
        if loads is None:
            return
        yield ImbalancePoint(sigma, seed, done.forecast.iteration_time, loads.busiest_expert, loads.busiest_rank)
