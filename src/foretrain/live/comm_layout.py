"""Which transfers an operation of the live simulation consists of: plans of collectives, and what has no plan."""

from __future__ import annotations

import dataclasses
from typing import Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from foretrain.collective import Operation
from foretrain.network.collective_placement import (
    Arrangement,
    arrange,
    choice_on,
    chunks,
    ranks_per_server,
    ring_orders,
)
from foretrain.network.deployment import Deployment

ALL_PAIRS: Final = 256
"""Ranks up to which an all-to-all has a flow for every pair."""
_LEAST_TARGETS: Final = 8
"""Beyond, to how many others each rank sends at the least."""
_PIECES: Final = 64
"""That NCCL's pipelines along trees are cut into at all sizes: with fewer, filling them would count."""

Group = tuple[int, ...]
"""World ranks in a group's order."""


class CommLayout(NamedTuple):
    """Transfers between endpoints, for one byte of the operation; columns as in `foretrain.collective.Plan`.

    Attributes:
        order: which member of the group each rank of the plan is.
        helpers: nodes of the topology, of the group itself.
        share: bytes of each step.
    """

    order: NDArray[np.int64]
    helpers: tuple[int, ...]
    source: NDArray[np.int32]
    target: NDArray[np.int32]
    channel: NDArray[np.int32]
    share: NDArray[np.float64]
    steps: NDArray[np.int32]
    first: NDArray[np.int32]
    after: NDArray[np.int32]
    lag: NDArray[np.int32]


def algorithm(where: Deployment, operation: str, size: int, members: NDArray[np.int64]) -> tuple[str, int]:
    """What carries a collective of ``size`` bytes among ``members`` of the topology, and in how many pieces."""
    if operation not in ("all_reduce", "all_gather", "reduce_scatter"):
        return operation, 0
    asked = cast(Operation, operation)
    if where.collective == "nccl":
        return choice_on(where.topology, members.tolist(), where.device, asked, size)[1], _PIECES
    name = where.collective
    if name == "auto" or (name == "double_tree" and operation != "all_reduce"):
        auto = dataclasses.replace(where, ranks=tuple(members.tolist()), collective="auto", _memo={})
        name = auto.collective_at(size, asked)
    return name, chunks(size)


def layout(where: Deployment, operation: str, members: NDArray[np.int64], name: str, pieces: int) -> CommLayout:
    """The transfers of ``operation``, carried by what `algorithm` says."""
    if operation in ("broadcast", "reduce"):
        return _chain(where, members, towards_root=operation == "reduce")
    if operation in ("gather", "scatter"):
        return _fan(len(members), towards_root=operation == "gather")
    if operation == "all_to_all":
        return _all_pairs(len(members))
    arrangement = arrange(name, cast(Operation, operation), where.topology, members.tolist(), pieces)
    return _from_plan(arrangement, members)


def message() -> CommLayout:
    """One transfer, from the first to the second."""
    return _at_once(2, np.zeros(1, np.int32), np.ones(1, np.int32), np.ones(1))


def _from_plan(arrangement: Arrangement, members: NDArray[np.int64]) -> CommLayout:
    """The layout of a plan."""
    plan = arrangement.plan
    place = {member: index for index, member in enumerate(members.tolist())}
    order = np.array([place[rank] for rank in arrangement.ranks.tolist()])
    columns = plan.source, plan.target, plan.channel, plan.size(1.0), plan.steps, plan.first, plan.after, plan.lag
    return CommLayout(order, arrangement.helpers, *columns)


def _chain(where: Deployment, members: NDArray[np.int64], *, towards_root: bool) -> CommLayout:
    """A broadcast or reduce of NCCL: a pipeline along each ring, all links of which are busy at once."""
    orders = ring_orders(where.topology, members, ranks_per_server(where.topology, members))
    orders = np.stack([np.roll(one, -int(np.flatnonzero(one == 0)[0])) for one in orders])
    source, target = orders[:, :-1].reshape(-1), orders[:, 1:].reshape(-1)
    if towards_root:
        source, target = target, source
    channel = np.repeat(np.arange(len(orders)), len(members) - 1)
    return _at_once(len(members), source, target, np.full(len(source), 1 / len(orders)), channel)


def _fan(count: int, *, towards_root: bool) -> CommLayout:
    """A gather or scatter: a message between the root and each other rank, of 1/N of the size each."""
    others = np.arange(1, count)
    root = np.zeros_like(others)
    source, target = (others, root) if towards_root else (root, others)
    return _at_once(count, source, target, np.full(len(others), 1 / count))


def _all_pairs(count: int) -> CommLayout:
    """An even all-to-all; among very many ranks each sends to some, evenly spread over the others, all it has."""
    apart = np.arange(1, count)
    if count > ALL_PAIRS:
        most = max(_LEAST_TARGETS, ALL_PAIRS**2 // (4 * count))
        apart = np.unique(np.linspace(1, count - 1, most).astype(np.int64))
    source = np.repeat(np.arange(count), len(apart))
    target = (source + np.tile(apart, count)) % count
    return _at_once(count, source, target, np.full(len(source), (count - 1) / count / len(apart)))


def uneven(count: int, source: NDArray[np.int64], target: NDArray[np.int64], size: NDArray[np.int64]) -> CommLayout:
    """An all-to-all of ``count`` ranks with a message for each entry, of ``size`` bytes if the operation has one."""
    sent = source != target
    return _at_once(count, source[sent], target[sent], size[sent].astype(np.float64))


def _at_once(
    ranks: int,
    source: NDArray[np.integer],
    target: NDArray[np.integer],
    share: NDArray[np.float64],
    channel: NDArray[np.integer] | None = None,
) -> CommLayout:
    """Transfers of one step that wait for nobody."""
    none, many = np.zeros(0, np.int32), len(source)
    lanes = np.zeros(many, np.int32) if channel is None else channel.astype(np.int32)
    ends = source.astype(np.int32), target.astype(np.int32)
    empty = np.zeros(many + 1, np.int32)
    return CommLayout(np.arange(ranks), (), *ends, lanes, share, np.ones(many, np.int32), empty, none, none)
