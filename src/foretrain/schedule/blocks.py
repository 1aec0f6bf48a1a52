"""Blocks: gradients that leave the backward pass at nearly the same instant (Prophet, ICPP'21, §3-4).

Frameworks aggregate and schedule, so gradients appear in steps and not one by one. Prophet sends block by block.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from foretrain.units import Time


def blocks(releases: Sequence[Time], factor: float = 2.0) -> tuple[tuple[int, ...], ...]:
    """Indices of ``releases`` in release order, cut where the gap to the next exceeds ``factor`` times the mean gap.

    Gradients released together keep their given order. The comparison is exact, so scaling all times changes nothing.
    The mean is over all gaps, also the empty ones, as in the authors' code. O(n log n).
    """
    if not releases:
        return ()
    order = sorted(range(len(releases)), key=releases.__getitem__)
    numerator, denominator = float(factor).as_integer_ratio()
    limit = numerator * (releases[order[-1]] - releases[order[0]])
    gaps = len(order) - 1
    found = [[order[0]]]
    for before, after in pairwise(order):
        if (releases[after] - releases[before]) * gaps * denominator > limit:
            found.append([])
        found[-1].append(after)
    return tuple(tuple(block) for block in found)
