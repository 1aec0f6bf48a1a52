"""Composition of losses over the hops of a collective: the average share of contributions that arrives.

Each hop loses a packet with probability p, independently; a lost gradient counts as zero and nothing is rescaled (DLCP,
arXiv 2008.08445). With N ranks:

    reduce-scatter (and all-gather)     ring               (1 − (1−p)^N) / (N·p)
                                        halving-doubling   (1 − p/2)^log2 N
    push (and pull)                     parameter server    1 − p

Why. A rank's own part of a block crosses no hop; in the ring the others' cross 1, 2, … N − 1 of them, so that the mean
is that of (1−p)^h over h = 0 … N − 1. In halving-doubling a part crosses a hop for each binary digit in which its rank
and the block's owner differ, which is any digit for half of all pairs. All-gather takes the same ways backwards, and
what it loses does not depend on what was lost before, so an all-reduce has the product of both. Derived here; the paper
measures. `foretrain.loss_tolerance.execution` has the same for every plan, without a formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

from foretrain.errors import ConfigError, unknown

Way: TypeAlias = Literal["ring", "halving_doubling", "parameter_server"]
"""How gradients are exchanged; names of `foretrain.collective.ALGORITHMS`."""


def ring(p: float, ranks: int) -> float:
    """Return the share of a reduce-scatter, or all-gather, around a ring."""
    if p == 0:
        return 1.0
    # 1 − (1−p)^N without cancellation for the small p that matter.
    return 1 / ranks if p == 1 else -math.expm1(ranks * math.log1p(-p)) / (ranks * p)


def halving_doubling(p: float, ranks: int) -> float:
    """Return the share of a reduce-scatter, or all-gather, by halving or doubling.

    Raises:
        ConfigError: ``ranks`` is no power of two; the plan for other numbers has a circle besides, and its own mean.
    """
    if ranks & (ranks - 1):
        remedy = "take a power of two, or foretrain.loss_tolerance.execution.surviving for any plan"
        raise ConfigError("ranks", ranks, "has no closed form by halving and doubling", remedy)
    return (1 - p / 2) ** (ranks.bit_length() - 1)


def parameter_server(p: float, ranks: int) -> float:
    """Return the share of a push, or pull, over one hop, however many ranks there are."""
    return 1 - p


_HALVES: dict[Way, Callable[[float, int], float]] = {
    "ring": ring,
    "halving_doubling": halving_doubling,
    "parameter_server": parameter_server,
}


def surviving(way: Way, p: float, ranks: int, *, halves: int = 2) -> float:
    """The mean share of a contribution that every rank ends with.

    >>> round(surviving("ring", 0.01, 8, halves=1), 3), round(surviving("ring", 0.01, 64, halves=1), 3)
    (0.966, 0.741)

    Args:
        way: of `Way`.
        p: of a hop, 0 to 1.
        ranks: N, at least 1; servers are not counted.
        halves: 1 for reduce-scatter or push alone, 2 for all-reduce or push and pull.

    Raises:
        ConfigError: a number is impossible, or there is no closed form.
    """
    if way not in _HALVES:
        raise unknown("way", way, get_args(Way))
    check_chance("p", p)
    if ranks < 1:
        raise ConfigError("ranks", ranks, "is below 1", "write e.g. 8")
    return _HALVES[way](p, ranks) ** halves


def budget(way: Way, total: float, ranks: int, *, halves: int = 2) -> float:
    """The p of a hop at which the collective as a whole loses the share ``total`` of every contribution on average.

    For a ring's reduce-scatter about 2·total / (N − 1), so p is to be accounted at the collective, not at the flow. (A
    budget of total / (N − 1) bounds the part that comes furthest as well.) Found by bisection, to the last bit.

    Args:
        way, ranks, halves: as `surviving` has them.
        total: 0 to below what is lost at p = 1.

    Raises:
        ConfigError: so much cannot be lost, since every rank has its own part for nothing.
    """
    most = 1 - surviving(way, 1.0, ranks, halves=halves)
    if not 0 <= total < max(most, math.ulp(0.0)):
        raise ConfigError("total", total, f"is not within 0 and {most:.4g}, which {way} loses at p = 1", "lower it")
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        if 1 - surviving(way, middle, ranks, halves=halves) <= total:
            low = middle
        else:
            high = middle
    return low


def check_chance(field: str, value: float) -> None:
    """ConfigError unless ``value`` is a probability."""
    if not 0 <= value <= 1:
        raise ConfigError(field, value, "is no probability", "write 0 to 1, e.g. 0.035 for 3.5 %")
