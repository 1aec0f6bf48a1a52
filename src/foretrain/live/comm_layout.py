"""Transfers of each operation of the live simulation: plans of collectives, messages, and uneven all-to-alls.

# Note [Two readings of a row]
In an uneven all-to-all a live member stands for others, and only its own row of splits is known: bytes to each member
of the group. What those it stands for send can be read from it in two ways. *Absolute*: they send the same to the same
members, as to a hot expert, to which everybody sends much. *Relative*: they send the same to those that are as far
behind them in the group, as in a shift, by which context parallelism rotates keys and values: there i sends all it has
to i + 1.

Which one is meant:

- Where the rows of several live members are known, the reading by which a row predicts the next one's better.
- Else, and where both do as well: relative if the row has a zero, absolute if it has none. Read as absolute, a zero
  would be a member to which nobody sends anything, and a shift one to which everybody sends all.

So what a rank sends to itself alone stays with everybody; and experts that get nothing from a live rank get something
from others. ``--live all`` needs no reading: every rank's row is known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from foretrain.collective import Operation
from foretrain.errors import ConfigError
from foretrain.network.collective_placement import (
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
"""Pieces into which NCCL's pipelines along trees are cut at all sizes: with fewer, filling them would count."""

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
    """Return the algorithm of a collective of ``size`` bytes among ``members`` of the topology, and its pieces."""
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
    """Return the transfers of ``operation`` by algorithm ``name``; see `algorithm`."""
    if operation in ("broadcast", "reduce"):
        return _chain(where, members, towards_root=operation == "reduce")
    if operation in ("gather", "scatter"):
        return _fan(len(members), towards_root=operation == "gather")
    if operation == "all_to_all":
        return _all_pairs(len(members))
    arrangement = arrange(name, cast(Operation, operation), where.topology, members.tolist(), pieces)
    plan, place = arrangement.plan, {member: index for index, member in enumerate(members.tolist())}
    order = np.array([place[rank] for rank in arrangement.ranks.tolist()])
    columns = plan.source, plan.target, plan.channel, plan.size(1.0), plan.steps, plan.first, plan.after, plan.lag
    return CommLayout(order, arrangement.helpers, *columns)


def message() -> CommLayout:
    """Return one transfer, from the first to the second."""
    return _at_once(2, np.zeros(1, np.int32), np.ones(1, np.int32), np.ones(1))


def _chain(where: Deployment, members: NDArray[np.int64], *, towards_root: bool) -> CommLayout:
    """Return a broadcast or reduce of NCCL: a pipeline along each ring, all links of which are busy at once."""
    orders = ring_orders(where.topology, members, ranks_per_server(where.topology, members))
    orders = np.stack([np.roll(one, -int(np.flatnonzero(one == 0)[0])) for one in orders])
    source, target = orders[:, :-1].reshape(-1), orders[:, 1:].reshape(-1)
    if towards_root:
        source, target = target, source
    channel = np.repeat(np.arange(len(orders)), len(members) - 1)
    return _at_once(len(members), source, target, np.full(len(source), 1 / len(orders)), channel)


def _fan(count: int, *, towards_root: bool) -> CommLayout:
    """Return a gather or scatter: a message between the root and each other rank, of 1/N of the size each."""
    others = np.arange(1, count)
    root = np.zeros_like(others)
    source, target = (others, root) if towards_root else (root, others)
    return _at_once(count, source, target, np.full(len(others), 1 / count))


def _all_pairs(count: int) -> CommLayout:
    """Return an even all-to-all; of very many ranks each sends all its bytes to a few evenly spread others."""
    apart = np.arange(1, count)
    if count > ALL_PAIRS:
        most = max(_LEAST_TARGETS, ALL_PAIRS**2 // (4 * count))
        apart = np.unique(np.linspace(1, count - 1, most).astype(np.int64))
    source = np.repeat(np.arange(count), len(apart))
    target = (source + np.tile(apart, count)) % count
    return _at_once(count, source, target, np.full(len(source), (count - 1) / count / len(apart)))


def uneven(count: int, source: NDArray[np.int64], target: NDArray[np.int64], size: NDArray[np.int64]) -> CommLayout:
    """Return an all-to-all of ``count`` ranks with a message for each entry; sizes are for an operation of one byte."""
    sent = source != target
    return _at_once(count, source[sent], target[sent], size[sent].astype(np.float64))


def _at_once(
    ranks: int,
    source: NDArray[np.integer],
    target: NDArray[np.integer],
    share: NDArray[np.float64],
    channel: NDArray[np.integer] | None = None,
) -> CommLayout:
    """Return transfers of one step without dependencies."""
    none, many = np.zeros(0, np.int32), len(source)
    lanes = np.zeros(many, np.int32) if channel is None else channel.astype(np.int32)
    ends = source.astype(np.int32), target.astype(np.int32)
    empty = np.zeros(many + 1, np.int32)
    return CommLayout(np.arange(ranks), (), *ends, lanes, share, np.ones(many, np.int32), empty, none, none)


Splits = Mapping[int, Sequence[int]] | Sequence[int]
"""Bytes to each rank of a group: from live members by world rank, or the same from all members."""


class Sends(NamedTuple):
    """Messages of an all-to-all, by members' places in the group.

    Attributes:
        source, target, size: one entry a message, int64; sizes in bytes, none of them 0.
        most: bytes that the member has which has most, its own block included.
    """

    source: NDArray[np.int64]
    target: NDArray[np.int64]
    size: NDArray[np.int64]
    most: int

    def one_each(self) -> bool:
        """Return whether no member sends to more than one other, as in a shift."""
        senders = self.source[self.source != self.target]
        return len(np.unique(senders)) == len(senders)


@dataclass(frozen=True, slots=True)
class Rows:
    """Known rows of one all-to-all.

    Attributes:
        known: ranks and their rows, as bytes of int64.
        alike: whether all members have the first row.
    """

    known: tuple[tuple[int, bytes], ...]
    alike: bool

    @classmethod
    def of(cls, group: Sequence[int], splits: Splits) -> Rows:
        """Return the rows of ``splits``; ConfigError if a row is not as long as the group."""
        by_rank = splits if isinstance(splits, Mapping) else {group[0]: splits}
        for rank, row in by_rank.items():
            if len(row) != len(group):
                raise ConfigError("splits", len(row), f"of rank {rank} are not one per rank", f"give {len(group)}")
        known = ((rank, np.asarray(row, np.int64).tobytes()) for rank, row in by_rank.items())
        return cls(tuple(known), not isinstance(splits, Mapping))

    def sends(self, group: Sequence[int], representative: Callable[[int], int], most: int) -> Sends | None:
        """Return the messages of all members, None if they are more than ``most``; see Note [Two readings of a row]."""
        index = {rank: place for place, rank in enumerate(group)}
        rows = {index[rank]: np.frombuffer(row, np.int64) for rank, row in self.known}
        own = np.array(self._tellers(group, representative, index))
        moves = not self.alike and relative(rows)
        parts: list[tuple[NDArray[np.int64], ...]] = []
        messages = 0
        for place, row in rows.items():
            mine, to = np.flatnonzero(own == place), np.flatnonzero(row)
            messages += len(mine) * len(to)
            if messages > most:
                return None
            target = (to + moves * (mine - place)[:, None]) % len(group)
            parts.append((np.repeat(mine, len(to)), target.reshape(-1), np.tile(row[to], len(mine))))
        source, target, size = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        order = np.lexsort((target, source))
        return Sends(source[order], target[order], size[order], max(int(row.sum()) for row in rows.values()))

    def _tellers(
        self, group: Sequence[int], representative: Callable[[int], int], index: Mapping[int, int]
    ) -> list[int]:
        """Return for each member the place of the row that it shares; the first's where its representative has none."""
        places = {rank: index[rank] for rank, _ in self.known}
        first = index[self.known[0][0]]
        return [places.get(rank, places.get(representative(rank), first)) for rank in group]


def relative(rows: Mapping[int, NDArray[np.int64]]) -> bool:
    """Return whether to read ``rows``, by place in the group, as relative: Note [Two readings of a row]."""
    moved = fixed = 0
    for (place, row), (other, its) in pairwise(sorted(rows.items())):
        moved += int(np.abs(its - np.roll(row, other - place)).sum())
        fixed += int(np.abs(its - row).sum())
    return moved < fixed if moved != fixed else any((row == 0).any() for row in rows.values())
