"""Comparison of two recipes: the interval of their ratio, what tells them apart, and why the slower one loses.

# Note [Shared errors]
Two recipes of one script on one cluster run the same kernels on the same GPU, and collectives over the same links. What
the forecast gets wrong of those is wrong in both, and cancels in a comparison. The error of a recipe's step has a part
that it shares with others of the same script and GPU, `SHARED` of its variance, and a part of its own. Of the shared
part only the kernels and the exposed communication count that one recipe has more of than the other. The own part has
that of the stack, too: by how much runs of a stack differ from their forecasts, published recipes of one model do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foretrain.live.forecast import EXCHANGE_SIGMA
from foretrain.recipe_search.evaluation import Account

SHARED = 0.16
"""Share of the variance of forecasts' errors that recipes of one model on one cluster have in common: the median of
published rankings that were measured with one batch, by ``benchmarks/search.py --published``."""
_NAMES = {
    "compute": "computation",
    "exposed": "exposed communication",
    "waiting": "waiting for other ranks",
    "idle": "waiting for the host",
}


@dataclass(frozen=True, slots=True)
class Ratio:
    """Time of one recipe over that of another.

    Attributes:
        value: the forecast.
        error: half of the interval that it is in with a probability of 95 %.
    """

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.error:.3f}"

    @property
    def open(self) -> bool:
        """Return whether it cannot be told which of the two is faster, whichever is compared with the other."""
        return abs(math.log(self.value)) <= self.error / self.value


def sigma(account: Account) -> float:
    """Return the standard deviation of a step's time, s: of its kernels' times and exposed communication."""
    return math.hypot(account.spread, EXCHANGE_SIGMA * account.exposed)


def interval(account: Account, stack_range: float) -> tuple[float, float]:
    """Return between which times a measured step lies with a probability of 95 %, s, as ``Forecast.interval`` does."""
    width = math.exp(math.hypot(stack_range, 2 * sigma(account) / account.time))
    return account.time / width, account.time * width


def ratio(mine: Account, other: Account, stack_range: float) -> Ratio:
    """Return the step's time of ``mine`` over that of ``other``; see Note [Shared errors].

    Args:
        mine: account of a step of one recipe.
        other: that of the other.
        stack_range: of both, see `foretrain.live.forecast.Forecast`; two standard deviations.
    """
    names = {*mine.kernels, *other.kernels}
    scale = max(_relative(mine), _relative(other))
    # Of a ratio, what is wrong by the same factor in both cancels: compare times as parts of their own step.
    differences = [
        scale * (mine.kernels.get(name, 0.0) / mine.time - other.kernels.get(name, 0.0) / other.time) for name in names
    ]
    exposed = EXCHANGE_SIGMA * (mine.exposed / mine.time - other.exposed / other.time)
    common = math.hypot(*differences, exposed)
    own = math.hypot(sigma(mine) / mine.time, sigma(other) / other.time, stack_range / 2, stack_range / 2)
    value = mine.time / other.time
    identical = mine == other
    error = 0.0 if identical else 2 * value * math.sqrt(SHARED * common**2 + (1 - SHARED) * own**2)
    return Ratio(value, error)


def _relative(account: Account) -> float:
    """Return the spread of kernels' times that, of each name independently, gives that of the whole."""
    return account.spread / max(math.hypot(*account.kernels.values()), 1e-12) if account.kernels else 0.0


def bound_by(account: Account) -> str:
    """Return what most of a step's time goes to, with its share, and the largest other where it is a tenth or more."""
    parts = sorted(((getattr(account, key), name) for key, name in _NAMES.items()), reverse=True)
    shown = [parts[0], *(part for part in parts[1:2] if part[0] >= 0.1 * account.time)]
    return ", ".join(f"{name} {time / account.time:.0%}" for time, name in shown)


def why_slower(loser: Account, winner: Account, scale: float = 1.0) -> str:
    """Return the account in which ``loser`` has most more than ``winner``; empty where it is not slower.

    Args:
        loser: that of the slower recipe.
        winner: that of the faster one.
        scale: tokens of the winner's step over those of the loser's, so that the same work is compared.
    """
    more = {name: scale * getattr(loser, key) - getattr(winner, key) for key, name in _NAMES.items()}
    name = max(more, key=lambda each: more[each])
    if scale * loser.time <= winner.time or more[name] <= 0:
        return ""
    text = f"{more[name] / winner.time:+.0%} {name}"
    if name == "computation" and scale * loser.flops <= 1.001 * winner.flops:
        slower = max(
            loser.kernels, key=lambda each: scale * loser.kernels[each] - winner.kernels.get(each, 0.0), default=""
        )
        text += f", most in {slower}" if slower else ""
    return text


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indexes of points that no other beats in both numbers, the least first number first."""
    found: list[int] = []
    for index in sorted(range(len(points)), key=lambda each: points[each]):
        if not found or points[index][1] < points[found[-1]][1]:
            found.append(index)
    return found
