"""Halving-doubling: halves are exchanged with one partner after another, on ever smaller data, and back."""

from __future__ import annotations

from typing import Literal, TypeAlias

from foretrain.collective.circulant import Circle, circle, exchange
from foretrain.collective.plan import Operation, Plan

Nearness: TypeAlias = Literal["near", "far"]
"""Whether the first exchange, which moves the most, is between neighbouring ranks or distant ones."""


def halving_doubling(operation: Operation, ranks: int, *, first: Nearness = "near") -> Plan:
    """Recursive halving and doubling (Rabenseifner 2004; Thakur et al. 2005), ⌈log2 N⌉ rounds each way.

    N = 2^a · m with m odd: a exchanges of halves, rank r with r XOR 2^t, then one circle of m ranks. Published variants
    fold the ranks beyond a power of two onto others, which costs up to twice the bytes and two rounds. The circle costs
    nothing: 2(N − 1)/N · S and ⌈log2 N⌉ rounds each way hold for every N; see `foretrain.collective.circulant`.

    Args:
        operation: all_reduce, reduce_scatter or all_gather.
        ranks: N, at least 2.
        first: partners of the first exchange; MPI libraries begin far, EFLOPS near.
    """
    return exchange("halving_doubling", operation, halvings(ranks), near_first=first == "near")


def halvings(ranks: int) -> list[Circle]:
    """Circles of two, and one of what is odd."""
    twos = (ranks & -ranks).bit_length() - 1
    odd = ranks >> twos
    return [circle(2)] * twos + ([circle(odd)] if odd > 1 else [])
