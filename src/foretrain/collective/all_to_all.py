"""All-to-all: every rank has another block for every rank. Block s·N + t goes from rank s to rank t."""

from __future__ import annotations

import numpy as np

from foretrain.collective.plan import Operation, Plan, assembled


def direct(operation: Operation, ranks: int) -> Plan:
    """Send everything at once: N(N − 1) transfers that wait for nothing."""
    source = np.repeat(np.arange(ranks), ranks - 1)
    target = (source + np.tile(np.arange(1, ranks), ranks)) % ranks
    everyone = np.arange(ranks)
    return assembled(
        "direct",
        operation,
        ranks,
        ranks**2,
        source,
        target,
        source * ranks + target,
        owner=np.repeat(everyone, ranks),
        receiver=np.tile(everyone, ranks),
    )


def pairwise(operation: Operation, ranks: int) -> Plan:
    """Exchange in N − 1 rounds: in round k rank r sends to r + k and receives from r − k, or r XOR k for a power of
    two.

    A rank begins a round when it has sent and received in the one before. The data does not need that; the rounds keep
    every rank to one message in each direction at a time (Thakur et al. 2005).
    """
    everyone, rounds = np.arange(ranks), np.arange(1, ranks)[:, None]
    paired = ranks & (ranks - 1) == 0
    target = everyone ^ rounds if paired else (everyone + rounds) % ranks
    origin = target if paired else (everyone - rounds) % ranks
    index = np.arange(rounds.size * ranks).reshape(-1, ranks)
    past = index[:-1]
    received = np.take_along_axis(past, origin[:-1], axis=1)
    return assembled(
        "pairwise",
        operation,
        ranks,
        ranks**2,
        np.tile(everyone, len(rounds)),
        target.reshape(-1),
        (everyone * ranks + target).reshape(-1),
        waiter=np.tile(index[1:].reshape(-1), 2),
        after=np.concatenate([past.reshape(-1), received.reshape(-1)]),
        owner=np.repeat(everyone, ranks),
        receiver=np.tile(everyone, ranks),
    )
