"""Whether forecasts are as sure as they say: ranges of stacks, how many measurements they hold, and five folds.

A forecast's 95 % interval is from t·exp(-w) to t·exp(w), where w is the hypotenuse of the stack's range and of two
standard deviations of this run's operators and collectives (`foretrain.live.forecast.Forecast.interval`). A stack's
range, on one server and across servers, is the smallest for which the interval holds 95 % of its runs. Stacks with few
runs, and those never seen, have that of a stack drawn at random: 95 % of all runs, where each stack weighs the same.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from row_outcome import Outcome
from summary import FITTED

from foretrain.device import preset
from foretrain.device.gpu import forecast_range

HELD = 0.95
FEW = 20
"""With fewer runs, 95 % of them is nothing that could be told from 90 or all."""
FOLDS = 5
SERVER = 8
"""GPUs of a server."""


def miss(one: Outcome) -> float:
    """The natural logarithm of measured by forecast."""
    assert one.predicted is not None
    return math.log(one.measured / one.predicted)


def own_width(one: Outcome) -> float:
    """Two relative standard deviations of the forecast; 0 of those that were read back from an earlier page."""
    assert one.predicted is not None
    return 2 * one.spread / one.predicted


def needed(one: Outcome) -> float:
    """The least range with which the interval holds the measurement."""
    return math.sqrt(max(0.0, miss(one) ** 2 - own_width(one) ** 2))


def width(one: Outcome, given: float | None = None) -> float:
    """Of the interval beside the forecast; with the stack's range as it is in foretrain, or another."""
    range_ = forecast_range(preset(one.device), one.stack, across=one.ranks > SERVER) if given is None else given
    return math.hypot(range_, own_width(one))


def held(one: Outcome, given: float | None = None) -> bool:
    """Whether the interval holds the measurement."""
    return abs(miss(one)) <= width(one, given)


def coverage(found: Sequence[Outcome]) -> float:
    """The part of measurements that the intervals hold; NaN of none."""
    return statistics.fmean(map(held, found)) if found else math.nan


def quantile(values: Iterable[tuple[float, float]]) -> float:
    """The least value that, with those below it, has 95 % of the weight."""
    ordered = sorted(values)
    enough, sum_ = HELD * sum(weight for _, weight in ordered) - 1e-9, 0.0
    for value, weight in ordered:
        sum_ += weight
        if sum_ >= enough:
            return value
    raise AssertionError("no values")


Group = tuple[str, str]
"""A stack, and whether its runs are ``within`` a server or ``across`` several."""


def group(one: Outcome) -> Group:
    """What shares a range."""
    return one.stack, "across" if one.ranks > SERVER else "within"


def ranges(found: Sequence[Outcome]) -> tuple[dict[Group, float], float]:
    """Of each group, and of those with few runs or none; rounded up to thousandths."""
    groups: dict[Group, list[float]] = defaultdict(list)
    stacks: dict[str, list[float]] = defaultdict(list)
    for one in found:
        groups[group(one)].append(needed(one))
        stacks[one.stack].append(needed(one))
    up = lambda value: math.ceil(1000 * value) / 1000  # noqa: E731
    unseen = up(quantile((value, 1 / len(values)) for values in stacks.values() for value in values))
    own = {name: up(quantile((value, 1.0) for value in ones)) for name, ones in groups.items() if len(ones) >= FEW}
    return own, unseen


def notation(found: Sequence[Outcome]) -> list[str]:
    """`ranges` as the lines of foretrain/device/stacks.toml: of each stack on the GPUs that it was seen on."""
    own, unseen = ranges(found)
    seen = sorted({(*group(one), one.device) for one in found if group(one) in own})
    lines = [f"{stack}: {where}.{device} = {own[stack, where]}" for stack, where, device in seen]
    return [f"eager: range = {unseen}", *lines]


def _fold(found: Sequence[Outcome]) -> Mapping[str, int]:
    """A fold for each run; in the order of how long they take, neighbours are in different ones."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for one in found:
        groups[one.stack].append(one)
    return {
        one.id: place % FOLDS
        for group in groups.values()
        for place, one in enumerate(sorted(group, key=lambda one: (one.measured, one.id)))
    }


def apart(found: Sequence[Outcome]) -> list[tuple[list[Outcome], list[Outcome]]]:
    """Of each of five folds: its runs, and all others."""
    fold = _fold(found)
    return [
        ([one for one in found if fold[one.id] == number], [one for one in found if fold[one.id] != number])
        for number in range(FOLDS)
    ]


def held_by_others(here: Sequence[Outcome], rest: Sequence[Outcome]) -> list[bool]:
    """Of each of ``here``, whether the interval holds it whose range comes from ``rest``."""
    own, unseen = ranges(rest)
    return [held(one, own.get(group(one), unseen)) for one in here]


def folds(found: Sequence[Outcome]) -> list[list[str]]:
    """Of each of five folds: runs, mean error, the part of measurements within intervals whose ranges are of the other
    four, and the mean error if those had corrected each stack on each GPU by their median."""
    lines = []
    for number, (here, rest) in enumerate(apart(found), 1):
        known: dict[tuple[str, str], list[float]] = defaultdict(list)
        for one in rest:
            known[one.stack, one.device].append(miss(one))
        corrected = [math.expm1(statistics.median(known[one.stack, one.device] or [0.0]) - miss(one)) for one in here]
        inside = statistics.fmean(held_by_others(here, rest))
        means = [statistics.fmean(map(abs, values)) for values in ([one.error for one in here], corrected)]
        lines.append([str(number), str(len(here)), f"{means[0]:.1%}", f"{inside:.0%}", f"{means[1]:.1%}"])
    return lines


FOLDS_HEAD = ("fold", "runs", "mean error", "held by ranges of the others", "mean error, corrected by the others")


def provenance(one: Outcome) -> str:
    """What a forecast rests on: whether a constant was fitted on this run or its stack, and on what its operators."""
    from factors import ANCHORS, HOST_ANCHORS

    if one.id in FITTED:
        return "fitted on this run"
    fitted = (one.device, one.stack) in (*ANCHORS, *HOST_ANCHORS)
    return "stack fitted on other runs" if fitted else "nothing fitted"


PROVENANCE_HEAD = ("forecasts with", "runs", "mean error", "measurements held")


def by_provenance(found: Sequence[Outcome]) -> list[list[str]]:
    """Runs, mean error, coverage; by what was fitted, and by the part of operators' times that is modelled."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for one in found:
        groups[provenance(one)].append(one)
        if one.shares:
            most = "modelled" if one.shares[2] + one.shares[3] > 0.5 else "measured or interpolated"
            groups[f"operators' time for the most part {most}"].append(one)
    return [
        [name, str(len(ones)), f"{statistics.fmean(abs(one.error) for one in ones):.1%}", f"{coverage(ones):.0%}"]
        for name, ones in sorted(groups.items())
    ]
