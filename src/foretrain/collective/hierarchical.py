"""Hierarchical collectives: reduce-scatter in each server, a collective per shard across servers, all-gather inside."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from foretrain.collective.composition import copies, in_turn
from foretrain.collective.plan import Operation, Plan
from foretrain.collective.ring import ring
from foretrain.errors import ConfigError


class Maker(Protocol):
    """What makes a plan for some number of ranks, at its defaults."""

    def __call__(self, operation: Operation, ranks: int, /) -> Plan:
        """The plan."""
        ...


def hierarchical(operation: Operation, ranks: int, *, local: int, inner: Maker = ring, outer: Maker = ring) -> Plan:
    """Servers of ``local`` ranks; server i has the ranks from i · local on (Goyal et al. 2017).

    All NICs of a server are used at once: the l-th ranks of all servers exchange the l-th shard, and all ``local``
    collectives run at the same time. Where both are bandwidth-optimal, so is the whole: 2(N − 1)/N · S a rank, of which
    only 2(n − 1)/(n·local) · S leave the server.

    Args:
        operation: all_reduce, reduce_scatter (stops after the second stage) or all_gather (omits the first).
        ranks: N.
        local: ranks of a server; divides N.
        inner: makes the reduce-scatter and the all-gather inside a server.
        outer: makes what is between servers. Its helpers serve all shards; those of ``inner`` are each server's own and
            come first.

    Raises:
        ConfigError: servers cannot be of that size, or no rank of a server has the shards.
    """
    if local < 2 or ranks % local or ranks == local:
        raise ConfigError(
            "local", local, f"does not divide {ranks} ranks into servers", "write at least 2 and at most half the ranks"
        )
    servers = ranks // local
    inside = inner("all_gather" if operation == "all_gather" else "reduce_scatter", local)
    between = outer(operation, servers)
    for field, stage in (("inner", inside), ("outer", between)):
        if stage.owner.max(initial=0) >= stage.ranks:
            raise ConfigError(field, stage.name, "leaves sums on helpers", "use one that leaves them on ranks: 'ring'")
    width, first = between.blocks, np.arange(servers)[:, None]
    helpers = ranks + first * inside.helpers + np.arange(inside.helpers)
    shelf = ranks + servers * inside.helpers + np.arange(between.helpers)

    def everywhere(plan: Plan) -> Plan:
        members = np.concatenate([first * local + np.arange(local), helpers], axis=1)
        return copies(plan, members, np.zeros(servers, np.int64), np.arange(plan.blocks + 1) * width)

    holders = inside.owner[:, None] + np.arange(servers) * local
    across = copies(
        between,
        np.concatenate([holders, np.tile(shelf, (len(holders), 1))], axis=1),
        np.arange(inside.blocks) * width,
        np.arange(width + 1),
    )
    stages = [everywhere(inside), across]
    if operation == "all_gather":
        stages = stages[::-1]
    elif operation == "all_reduce":
        back = inner("all_gather", local)
        assert np.array_equal(back.owner, inside.owner)
        stages.append(everywhere(back))
    return in_turn(
        "hierarchical",
        operation,
        ranks,
        inside.blocks * width,
        stages,
        helpers=servers * inside.helpers + between.helpers,
        owner=() if operation == "all_reduce" else (between.owner * local + inside.owner[:, None]).reshape(-1),
    )
