"""choose: the best schedule with its expected gain, or plain DDP where there is nothing to be won.

# Note [Uncertainty of a gain]
Two things are uncertain. The forecast itself: what the simulator leaves out. And what it is given: rate, θ, latency and
computation were measured, or assumed, with a spread. The first counts for either schedule; of the second one at a time
is changed by one standard deviation *for both*, for a slower link slows both, and what the gain then changes by counts.
All of it adds up in quadrature. So does what updating beside the computation gains: the simulator takes room for it for
granted, and a device that is busy has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from foretrain.errors import ConfigError
from foretrain.network import Cluster, Place, cluster
from foretrain.planner.candidate_search import (
    COMPRESSIONS,
    ENOUGH,
    Candidate,
    Setting,
    compressed,
    describe,
    engine_of,
    halvable,
    run,
    streaming,
)
from foretrain.planner.search import forecaster
from foretrain.schedule import POLICIES, Spec
from foretrain.units import Time, format_time
from foretrain.workload.step import Workload


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
SERVED = GainUncertainty(forecast=0.024, rate=0.07, latency=0.2, overhead=0.2)
"""Over a parameter server forecasts leave out the servers' cores. Steps take longer, all schedules alike, as on links
7 % slower; beside that each forecast is off by 1.6 % in the median. `deviations` in benchmarks/ps.py has both."""
CROWDED = 0.206
"""Of forecasts where communication takes the cores that compute: off by 13.8 % in the median over the eight cases of
the real transformer in benchmarks/lab.py."""


def usual(place: Place, crowding: float = 0.0) -> GainUncertainty:
    """Return the uncertainty of forecasts on ``place``; ``crowding`` is how busy the communicating cores are, 0 to
    1.
    """
    found = ALL_REDUCE if engine_of(place) == "all_reduce" else SERVED
    return replace(found, forecast=max(found.forecast, crowding * CROWDED))


def ratio_deviation(one: Place, other: Place) -> float:
    """Return the relative standard deviation of the ratio of two forecasts, one on each place."""
    return math.hypot(usual(one).forecast, usual(other).forecast)


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


WORTH = 0.01
"""A gain below it is nobody's reason to leave plain DDP, however certain."""
_ABREAST = 1.05
"""Time over the fastest's up to which the fastest of another engine is preferred for being more certain."""
_WHAT_IF = 6
"""Simulations for what compression would bring."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Recommended schedule, with its baseline, alternatives and uncertainty.

    Attributes:
        chosen: the best candidate, or the baseline where that gains too little.
        baseline: DDP at its best bucket size, without compression, by all-reduce if there is such an engine.
        best: the fastest candidate, chosen or not.
        candidates: all that were considered, the fastest first, with those that were skipped.
        uncertainty: one standard deviation of the gain of ``best``.
        compressing: what sending half the bytes would bring, where it is not allowed.
        simulations: how many it took.
    """

    chosen: Candidate
    baseline: Candidate
    best: Candidate
    candidates: tuple[Candidate, ...]
    uncertainty: float
    compressing: Candidate | None
    simulations: int

    @property
    def schedule(self) -> Spec:
        """The policy with its knobs."""
        return self.chosen.schedule

    @property
    def time(self) -> Time:
        """Return the expected iteration time."""
        return _time(self.chosen)

    @property
    def gain(self) -> float:
        """Expected, over DDP at its best: 0.05 is 5 % more iterations in the same time."""
        return self.gain_of(self.chosen)

    @property
    def falls_back(self) -> bool:
        """Return whether plain DDP was chosen for want of a gain."""
        return self.chosen is self.baseline

    def gain_of(self, one: Candidate) -> float:
        """Return the gain of one simulated candidate over the baseline."""
        return _time(self.baseline) / _time(one) - 1

    @property
    def lines(self) -> tuple[str, str]:
        """Return two lines: the choice and its reason."""
        return _what(self), _why(self)


def choose(
    workload: Workload,
    where: str | Place | Sequence[Place],
    *,
    allow: Sequence[str] = (),
    careful: bool = False,
    doubt: GainUncertainty | None = None,
    crowding: float = 0.0,
    memory: float | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Recommendation:
    """The best of every policy × knobs × engine × compression, or plain DDP where it gains less than is certain.

    Args:
        workload: one worker's step, uncompressed.
        where: a cluster or its notation, or the same hosts with several engines (`foretrain.planner.candidate_search`).
        allow: compressions that may be chosen. They change what is computed, so that by default none is, and the
            choice only says what one would bring.
        careful: keep to knobs that real links forgive; see `foretrain.planner.tune`.
        doubt: of the forecasts; by default as far as ours were off, by engine.
        crowding: how busy the cores are that communicate, 0 to 1; adds to the doubt.
        memory: bytes/s of the memory in which gradients are rounded, where ``where`` does not name a GPU.
        progress: told what comes next.

    Raises:
        ConfigError: there is nowhere to run, or no such compression.
    """
    places = [cluster(where)] if isinstance(where, str) or not isinstance(where, Sequence) else list(where)
    if not places:
        raise ConfigError("where", places, "is empty", "name a cluster")
    kinds: list[str | None] = [None, *dict.fromkeys(allow)]
    settings = [
        Setting(compressed(workload, kind, memory or streaming(place)), place, kind, careful)
        for kind in kinds
        for place in places
    ]
    progress("ddp", 0, 3)
    baseline = settings[0].baseline()
    progress("policies", 1, 3)
    found = run(settings, baseline)
    progress("uncertainty", 2, 3)
    best, spread = _surest(settings, baseline, found, lambda one: _uncertainty(baseline, one, doubt, crowding))
    gain = _time(baseline) / _time(best) - 1
    chosen = best if gain >= WORTH and gain > spread else baseline
    compressing = _what_if(workload, chosen, careful, memory) if kinds == [None] and halvable(workload) else None
    progress("done", 3, 3)
    known = {id(one): one for one in (baseline, best, *found)}
    everything = sorted(known.values(), key=lambda one: (one.time is None, one.time or 0))
    simulations = sum(setting.simulations for setting in settings)
    return Recommendation(chosen, baseline, best, tuple(everything), spread, compressing, simulations)


def _surest(
    settings: Sequence[Setting],
    baseline: Candidate,
    found: Sequence[Candidate],
    uncertain: Callable[[Candidate], float],
) -> tuple[Candidate, float]:
    """The candidate whose gain is the largest for sure, and how uncertain it is.

    It is the fastest of its engine and compression. Of two engines that are forecast to be as fast, the one whose
    forecasts have been better wins.
    """
    best, spread = baseline, 0.0
    fastest = min([_time(baseline), *(_time(one) for one in found if one.time is not None)])
    for setting in settings:
        here = [one for one in found if one.place is setting.place and one.compression == setting.compression]
        timed = [one for one in here if one.time is not None and one.time < _time(baseline)]
        if not timed or _time(first := min(timed, key=_time)) > fastest * _ABREAST:
            continue
        doubtful = uncertain(first)
        gain, limit = (_time(baseline) / time - 1 for time in (_time(first), first.optimum.time))
        if gain <= doubtful < limit and gain + ENOUGH >= WORTH:
            first = setting.sharpened(first)
            doubtful = uncertain(first)
            gain = _time(baseline) / _time(first) - 1
        if best is baseline or gain - doubtful > _time(baseline) / _time(best) - 1 - spread:
            best, spread = first, doubtful
    return best, spread


def _time(one: Candidate) -> Time:
    assert one.time is not None
    return one.time


def _uncertainty(baseline: Candidate, best: Candidate, doubt: GainUncertainty | None, crowding: float) -> float:
    if best is baseline:
        return 0.0
    both = (doubt or usual(baseline.place, crowding), doubt or usual(best.place, crowding))
    return uncertainty(baseline, best, both)


def _what_if(workload: Workload, chosen: Candidate, careful: bool, memory: float | None) -> Candidate | None:
    """Simulate half the bytes under the same policy, or ByteScheduler in DDP's place; None where that cannot help."""
    kind = COMPRESSIONS[0]
    setting = Setting(compressed(workload, kind, memory or streaming(chosen.place)), chosen.place, kind, careful)
    if setting.optimum.time >= _time(chosen) * (1 - ENOUGH):
        return None
    names = {chosen.schedule.name, "bytescheduler"}
    found = min((setting.searched(name, _WHAT_IF) for name in sorted(names)), key=_time)
    return found if _time(found) < _time(chosen) * (1 - ENOUGH) else None


def _what(choice: Recommendation) -> str:
    chosen, baseline, best = choice.chosen, choice.baseline, choice.best
    ddp = f"{baseline.schedule}, {format_time(_time(baseline))}"
    if not choice.falls_back:
        sent = f" in {chosen.compression}" if chosen.compression else ""
        return (
            f"auto: {chosen.schedule} by {describe(chosen.place)}{sent}: {format_time(choice.time)} an iteration, "
            f"{choice.gain:.1%} ± {choice.uncertainty:.1%} faster than DDP at its best ({ddp}), "
            f"{chosen.gap:.1%} above T*"
        )
    if best is baseline:
        gained = "nothing is to be won"
    else:
        gain = f"{choice.gain_of(best):.1%} ± {choice.uncertainty:.1%}"
        gained = f"{gain} faster, as {best.schedule.name} is forecast to be, is no certain gain"
    return f"auto: plain DDP ({ddp} an iteration): {gained}"


def _why(choice: Recommendation) -> str:
    chosen = choice.chosen
    optimum = chosen.optimum
    ratio = f"communication takes {optimum.link / optimum.compute:.2f}× as long as computation"
    limit = _time(choice.baseline) / min(one.optimum.time for one in choice.candidates)
    skipped = sum(one.time is None for one in choice.candidates)
    ruled_out = f"bounds rule {skipped} of {len(choice.candidates)} candidates out"
    parts = [ratio, f"no schedule can gain more than {max(0.0, limit - 1):.1%}", *[ruled_out] * (skipped > 0)]
    if choice.best is choice.baseline and (tried := len(choice.candidates) - skipped - 1):
        parts.append(f"of {tried} others that were simulated none is faster")
    if choice.compressing is not None:
        half = choice.compressing
        took = f"{format_time(_time(half))}, a gain of {choice.gain_of(half):.1%}"
        parts.append(f"if it were allowed, compression={half.compression!r} would make it {took}")
    return f"auto: because {'; '.join(parts)}"
