"""Broadcasts of whole messages: flat and along a binomial tree. Pipelined ones are those of rings and double trees."""

from __future__ import annotations

import numpy as np

from foretrain.collective.plan import Draft, Operation, Plan, assembled


def flat(operation: Operation, ranks: int, *, root: int = 0) -> Plan:
    """Send from the root to all others at once."""
    others = np.delete(np.arange(ranks), root)
    return assembled("flat", operation, ranks, 1, np.full(ranks - 1, root), others, 0, owner=[root])


def binomial(operation: Operation, ranks: int, *, root: int = 0) -> Plan:
    """Send along a binomial tree: in each of ⌈log2 N⌉ rounds every holder serves one more rank (Thakur et al. 2005).

    A rank sends one message after the other. The data does not need that, but else the root would divide its link
    among log2 N messages and the tree would win nothing.
    """
    draft = Draft("binomial", operation, ranks, 1, owner=[root])
    has: dict[int, int | None] = {0: None}
    apart = 1 << (ranks - 1).bit_length()
    while apart > 1:
        apart //= 2
        for node, latest in list(has.items()):
            if node + apart < ranks:
                source, target = (node + root) % ranks, (node + apart + root) % ranks
                sent = draft.transfer(source, target, 0, after=() if latest is None else (latest,))
                has[node] = has[node + apart] = sent
    return draft.plan()
