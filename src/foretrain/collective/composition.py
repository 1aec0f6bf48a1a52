"""Plans made of plans: copies side by side on parts of ranks and blocks, and stages one after the other.

Hierarchical collectives: reduce-scatter in each server, a collective per shard across servers, all-gather inside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foretrain.collective.plan import WHOLE, Operation, Plan, assembled
from foretrain.collective.ring import ring
from foretrain.errors import ConfigError


def copies(plan: Plan, endpoints: ArrayLike, base: ArrayLike, edges: ArrayLike, *, channel: ArrayLike = 0) -> Plan:
    """Copy ``plan`` several times. Ranks, helpers, blocks and owners of the result are those of the arguments.

    Args:
        plan: what each copy does.
        endpoints: int (copies, ranks + helpers of the plan), who plays each of its endpoints.
        base: int (copies,), where the data of each copy begins.
        edges: int (blocks of the plan + 1,), where in a copy's data each of its blocks begins, and the end. Only where
            a transfer strides do they have to be of one size.
        channel: int (copies,), added to the channels.

    Returns:
        A plan whose transfers are those of the first copy, then those of the second and so on.
    """
    who, start, edge = np.asarray(endpoints), np.asarray(base)[:, None], np.asarray(edges)
    many, each = len(who), plan.transfers
    low, whole = edge[plan.base], plan.base + plan.modulus
    stop = plan.head + plan.count
    wraps = np.maximum(stop - plan.modulus, 0)
    size = edge[plan.base + stop - wraps] - edge[plan.base + plan.head] + edge[plan.base + wraps] - low
    even = (edge[-1] - edge[0]) // max(1, len(edge) - 1)

    def tiled(column: NDArray) -> NDArray:
        return np.tile(column, many)

    offset = np.arange(many)[:, None] * each
    return assembled(
        plan.name,
        plan.operation,
        plan.ranks,
        int(np.asarray(base).max() + edge[-1]),
        who[:, plan.source].reshape(-1),
        who[:, plan.target].reshape(-1),
        tiled(edge[plan.base + plan.head] - low),
        waiter=(offset + plan.waiter).reshape(-1),
        after=(offset + plan.after).reshape(-1),
        lag=tiled(plan.lag),
        helpers=plan.helpers,
        channel=(np.broadcast_to(np.asarray(channel), (many,))[:, None] + plan.channel).reshape(-1),
        steps=tiled(plan.steps),
        count=tiled(size),
        base=(start + low).reshape(-1),
        stride=tiled(plan.stride * even),
        modulus=tiled(edge[whole] - low),
        adds=tiled(plan.adds),
    )


def together(plans: Sequence[Plan]) -> Plan:
    """Join plans over the same endpoints and blocks that run at the same time, independent of each other."""
    return _joined(plans, [])


def part_of(plan: Plan, kept: NDArray[np.bool_]) -> Plan:
    """Return the transfers marked in ``kept`` and the dependencies among them."""
    index = np.cumsum(kept) - 1
    waiter = plan.waiter
    both = kept[waiter] & kept[plan.after]
    first = np.zeros(int(kept.sum()) + 1, np.int32)
    np.cumsum(np.bincount(index[waiter[both]], minlength=len(first) - 1), out=first[1:])
    columns = ("source", "target", "channel", "steps", "count", "base", "head", "stride", "modulus", "adds")
    return dataclasses.replace(
        plan,
        first=first,
        after=index[plan.after[both]].astype(np.int32),
        lag=plan.lag[both],
        **{name: getattr(plan, name)[kept] for name in columns},
    )


def in_turn(
    name: str,
    operation: Operation,
    ranks: int,
    blocks: int,
    stages: Sequence[Plan],
    *,
    helpers: int = 0,
    owner: ArrayLike = (),
) -> Plan:
    """Join stages over the same endpoints and blocks: a rank begins with one when the one before has ended at this
    rank.

    Args:
        name, operation, ranks, blocks, helpers, owner: of the whole.
        stages: in their order.
    """
    glue, starts = [], np.cumsum([0, *(stage.transfers for stage in stages)])
    whole = _joined(stages, [])
    last = np.zeros((2, 0), np.int64)
    for stage, start in zip(stages, starts, strict=False):
        glue += _glued(whole, int(start), int(start) + stage.transfers, last)
        touched = np.union1d(stage.source, stage.target)
        kept = last[:, ~np.isin(last[1], touched)]
        last = np.concatenate([kept, _exits(stage) + np.array([[start], [0]])], axis=1)
    joined = _joined(stages, glue)
    return dataclasses.replace(
        joined,
        name=name,
        operation=operation,
        ranks=ranks,
        blocks=blocks,
        helpers=helpers,
        owner=np.asarray(owner, np.int32),
    )


def _joined(plans: Sequence[Plan], glue: Sequence[NDArray[np.int64]]) -> Plan:
    """Join all transfers of all plans; ``glue`` are further dependencies, each (2, any): waiter, awaited."""
    starts = np.cumsum([0, *(plan.transfers for plan in plans)])
    extra = np.concatenate([np.zeros((2, 0), np.int64), *glue], axis=1)

    def column(name: str) -> NDArray:
        return np.concatenate([getattr(plan, name) for plan in plans])

    shifted = list(zip(plans, starts, strict=False))
    return assembled(
        plans[0].name,
        plans[0].operation,
        plans[0].ranks,
        plans[0].blocks,
        waiter=np.concatenate([*(plan.waiter + start for plan, start in shifted), extra[0]]),
        after=np.concatenate([*(plan.after + start for plan, start in shifted), extra[1]]),
        lag=np.concatenate([column("lag"), np.full(extra.shape[1], WHOLE)]),
        helpers=plans[0].helpers,
        **{
            name: column(name)
            for name in ("source", "target", "head", "channel", "steps", "count", "base", "stride", "modulus", "adds")
        },
    )


# Note [What a stage waits for]
# Exits of a rank are arrivals that no other transfer at this rank waits for, and sends that imply arrivals. What the
# rank sends in the next stage waits for the exits that moved the same blocks, unless it waits for another send of the
# rank that does. An arrival waits only for what could overwrite it: sums may be added to in any order.


def _exits(plan: Plan) -> NDArray[np.int64]:
    """Return (transfer, endpoint) in columns: when these have ended, the endpoint's data is as the plan leaves it."""
    waiter = plan.waiter
    whole = plan.steps[waiter] - 1 + plan.lag.astype(np.int64) >= plan.steps[plan.after]
    waiter, after = waiter[whole], plan.after[whole]
    arrives, leaves, implies = (np.zeros(plan.transfers, np.bool_) for _ in range(3))
    for end in (plan.source[waiter], plan.target[waiter]):
        arrives[after[plan.target[after] == end]] = True
        leaves[after[plan.source[after] == end]] = True
    here = plan.source[waiter]
    implies[waiter[(plan.target[after] == here) | (plan.source[after] == here)]] = True
    arriving, leaving = np.flatnonzero(~arrives), np.flatnonzero(~leaves & implies)
    return np.stack(
        [np.concatenate([arriving, leaving]), np.concatenate([plan.target[arriving], plan.source[leaving]])]
    ).astype(np.int64)


def _glued(whole: Plan, start: int, stop: int, last: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the dependencies of the stage ``start:stop`` on the exits ``last``; see Note [What a stage waits for]."""
    mine = np.arange(start, stop)
    one, other = _at(whole.source[mine], last)
    needed = _overlap(whole, mine[one], last[0][other]) | (whole.target[last[0][other]] != last[1][other])
    sends, exits = mine[one[needed]], last[0][other[needed]]
    slots = np.searchsorted(np.sort(last[1]), last[1][other[needed]])
    slots = np.argsort(np.argsort(last[1], kind="stable"))[other[needed]] - slots
    first = np.zeros(len(sends), np.bool_)
    for slot in np.unique(slots).tolist():
        these = slots == slot
        first[these] = ~_implied_sends(whole, start, stop, sends[these])[sends[these]]
    one, other = _at(whole.target[mine], last)
    late = ~_waits_at_receiver(whole)[mine[one]] & (whole.target[last[0][other]] == last[1][other])
    late &= (whole.adds < whole.steps)[last[0][other]] & _overlap(whole, mine[one], last[0][other])
    return [np.stack([sends[first], exits[first]]), np.stack([mine[one[late]], last[0][other[late]]])]


def _at(endpoints: NDArray[np.int32], last: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return all pairs of an index into ``endpoints`` and one into ``last`` that are of the same endpoint."""
    order = np.argsort(last[1], kind="stable")
    low, high = (np.searchsorted(last[1][order], endpoints, side) for side in ("left", "right"))
    one = np.repeat(np.arange(len(endpoints)), high - low)
    inside = np.arange(len(one)) - np.repeat(np.cumsum(high - low) - (high - low), high - low)
    return one, order[np.repeat(low, high - low) + inside]


def _implied_sends(plan: Plan, start: int, stop: int, sends: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether each transfer waits, if not at once, for one of ``sends`` by the same sender."""
    waiter, after = plan.waiter, plan.after
    own = (plan.lag > 0) & (plan.source[waiter] == plan.source[after]) & (waiter >= start) & (waiter < stop)
    waiter, after = waiter[own], after[own]
    knows, implied = (np.zeros(plan.transfers, np.bool_) for _ in range(2))
    knows[sends] = True
    while not implied[told := waiter[knows[after]]].all():
        implied[told] = knows[told] = True
    return implied


def _waits_at_receiver(plan: Plan) -> NDArray[np.bool_]:
    """Return whether each transfer waits for another one at its receiver."""
    waits = plan.lag > 0
    waiter, after = plan.waiter[waits], plan.after[waits]
    found = np.zeros(plan.transfers, np.bool_)
    found[waiter[(plan.source[after] == plan.target[waiter]) | (plan.target[after] == plan.target[waiter])]] = True
    return found


def _overlap(plan: Plan, one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether two transfers have a block in common."""
    return np.any(
        [(a < b) & (c < d) & (a < d) & (c < b) for a, b in _pieces(plan, one) for c, d in _pieces(plan, other)],
        axis=0,
    )


def _pieces(plan: Plan, which: NDArray[np.int64]) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Return the blocks that transfers move in all their steps, as two intervals each; gaps of a stride are counted."""
    base, modulus, stride = (column[which].astype(np.int64) for column in (plan.base, plan.modulus, plan.stride))
    travel = stride * (plan.steps[which] - 1)
    length = np.minimum(np.abs(travel) + plan.count[which], modulus)
    low = (plan.head[which] + np.minimum(travel, 0)) % modulus
    wraps = np.maximum(low + length - modulus, 0)
    return [(base + low, base + low + length - wraps), (base, base + wraps)]


class Maker(Protocol):
    """Function that makes a plan for some number of ranks, with default options."""

    def __call__(self, operation: Operation, ranks: int, /) -> Plan:
        """Return the plan."""
        ...


def hierarchical(operation: Operation, ranks: int, *, local: int, inner: Maker = ring, outer: Maker = ring) -> Plan:
    """Exchange inside servers and between them; server i has the ranks from i · local on (Goyal et al. 2017).

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
    outer_helpers = ranks + servers * inside.helpers + np.arange(between.helpers)

    def in_each_server(plan: Plan) -> Plan:
        members = np.concatenate([first * local + np.arange(local), helpers], axis=1)
        return copies(plan, members, np.zeros(servers, np.int64), np.arange(plan.blocks + 1) * width)

    holders = inside.owner[:, None] + np.arange(servers) * local
    across = copies(
        between,
        np.concatenate([holders, np.tile(outer_helpers, (len(holders), 1))], axis=1),
        np.arange(inside.blocks) * width,
        np.arange(width + 1),
    )
    stages = [in_each_server(inside), across]
    if operation == "all_gather":
        stages = stages[::-1]
    elif operation == "all_reduce":
        back = inner("all_gather", local)
        assert np.array_equal(back.owner, inside.owner)
        stages.append(in_each_server(back))
    return in_turn(
        "hierarchical",
        operation,
        ranks,
        inside.blocks * width,
        stages,
        helpers=servers * inside.helpers + between.helpers,
        owner=() if operation == "all_reduce" else (between.owner * local + inside.owner[:, None]).reshape(-1),
    )
