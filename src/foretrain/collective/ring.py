"""Rings: every rank passes on to the next one what it has from the one before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foretrain.collective.plan import Operation, Plan, assembled
from foretrain.errors import ConfigError


def ring(
    operation: Operation,
    ranks: int,
    *,
    channels: int = 1,
    bidirectional: bool = False,
    orders: Sequence[Sequence[int]] | NDArray[np.integer] | None = None,
    root: int = 0,
    chunks: int = 8,
) -> Plan:
    """Exchange along rings, each channel with an equal share of the data and N transfers (Patarasuk and Yuan, 2009).

    Args:
        operation: all_reduce (2(N − 1) steps), reduce_scatter or all_gather (N − 1), or broadcast, a pipeline along the
            ring of N − 2 + chunks steps.
        ranks: N, at least 2.
        channels: rings with the ranks in the same order.
        bidirectional: besides each ring, one in the other direction.
        orders: for each channel the ranks in the order of its ring, instead of ``channels``.
        root: where a broadcast begins.
        chunks: how many pieces a channel of a broadcast is cut into.

    Raises:
        ConfigError: an order is not a permutation of the ranks.
    """
    given = np.tile(np.arange(ranks), (channels, 1)) if orders is None else _checked(orders, ranks)
    order = np.concatenate([given, given[:, ::-1]]) if bidirectional else given
    if operation == "broadcast":
        return _pipeline(order, root, chunks)
    lanes, place = order.shape[0], np.arange(ranks)
    base = np.repeat(np.arange(lanes) * ranks, ranks)
    rotation = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}[operation]
    # What reaches a place last is the block before the one it sent first; a reduce-scatter is to end with one's own.
    ahead = 1 if operation == "reduce_scatter" else 0
    steps = rotation * (ranks - 1)
    waiter = np.arange(lanes * ranks if steps > 1 else 0)
    return assembled(
        "ring",
        operation,
        ranks,
        lanes * ranks,
        order.reshape(-1),
        np.roll(order, -1, axis=1).reshape(-1),
        np.tile((place - ahead) % ranks, lanes),
        waiter=waiter,
        after=base[waiter] + (waiter - 1) % ranks,
        lag=0,
        owner=() if operation == "all_reduce" else order.reshape(-1),
        channel=np.repeat(np.arange(lanes), ranks),
        steps=steps,
        base=base,
        stride=-1,
        modulus=ranks,
        adds=0 if operation == "all_gather" else ranks - 1,
    )


def _pipeline(order: NDArray[np.integer], root: int, chunks: int) -> Plan:
    """Build a chain from ``root`` along each order; a rank passes on a chunk once it has it."""
    lanes, ranks = order.shape
    chain = np.stack([np.roll(one, -int(np.flatnonzero(one == root)[0])) for one in order])
    edges = np.arange(lanes * (ranks - 1)).reshape(lanes, -1)
    return assembled(
        "ring",
        "broadcast",
        ranks,
        lanes * chunks,
        chain[:, :-1].reshape(-1),
        chain[:, 1:].reshape(-1),
        0,
        waiter=edges[:, 1:].reshape(-1),
        after=edges[:, :-1].reshape(-1),
        lag=1,
        owner=np.full(lanes * chunks, root),
        channel=np.repeat(np.arange(lanes), ranks - 1),
        steps=chunks,
        base=np.repeat(np.arange(lanes) * chunks, ranks - 1),
        stride=1,
        modulus=chunks,
    )


def _checked(orders: Sequence[Sequence[int]] | NDArray[np.integer], ranks: int) -> NDArray[np.int64]:
    for channel, order in enumerate(orders):
        if not np.array_equal(np.sort(order), np.arange(ranks)):
            raise ConfigError(
                f"orders[{channel}]", list(order), "is not an order of all ranks", f"name each of 0 to {ranks - 1} once"
            )
    return np.asarray(orders, np.int64).reshape(-1, ranks)
