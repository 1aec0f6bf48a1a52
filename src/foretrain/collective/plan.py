"""A collective as data: a DAG of transfers between ranks, without sizes, links or time.

The data of a collective is cut into ``blocks`` equal blocks. A *transfer* is a channel from one rank to another that
moves ``count`` consecutive blocks in each of its ``steps``; a ring of 4,096 ranks is 4,096 transfers of 8,190 steps,
not 33 million. A transfer reads at the source when a step starts and writes at the target when it ends: it adds in
its first ``adds`` steps, and overwrites afterwards.

    blocks of step s:   base + (head + stride · s + i) mod modulus   for i from 0 to count − 1

Dependencies are between transfers, with one rule: step s (from 0) of a transfer starts when its own step s − 1 has
ended, and each transfer p in ``after`` has ended ``min(steps[p], s + lag)`` of its steps. So lag 0 is a ring's
lock step (my step s needs what my predecessor's step s − 1 brought), lag 1 a pipeline (my step s passes on its step s),
and `WHOLE` waits for all of it. `PlanProgress` executes this rule.

Besides the ranks there may be *helpers* (parameter servers, reducing switches), numbered from ``ranks`` on. Their
memory is zero in the beginning, so that a server can add what arrives first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foretrain.errors import StallError

Operation: TypeAlias = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]
"""Result of a plan."""

_NONE = np.zeros(0, np.int32)

WHOLE = 2**30
"""The lag of a dependency on all steps."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Transfers in columns; column lengths are (transfers,) unless said.

    Attributes:
        name: algorithm, e.g. ``"ring"``.
        operation: what every rank has at the end; see `foretrain.collective.verify`.
        ranks: N.
        helpers: endpoints besides the ranks: numbered N to N + helpers − 1.
        blocks: how many blocks the data has. For all_gather and reduce_scatter the data is the whole of all ranks; for
            all_to_all every rank's own data has blocks / N of them.
        owner: int32 (blocks,): the rank, or helper, that ends with a block's sum (reduce_scatter), brings it
            (all_gather, broadcast, all_to_all); of no meaning, and empty, for all_reduce.
        receiver: int32 (blocks,): the rank that a block is for, in all_to_all only; else empty.
        source, target: endpoints, int32.
        channel: int32; transfers of one channel between one pair of endpoints share a connection, hence an ECMP path.
        steps: int32, at least 1.
        count: int32, consecutive blocks moved in each step; what would pass the modulus begins anew at the base.
        base, head, stride, modulus: int32, which block a step moves; see above.
        adds: int32, how many of the first steps add.
        first: int32 (transfers + 1,), compressed sparse rows over ``after``.
        after: int32 (dependencies,), a transfer waited for.
        lag: int32 (dependencies,), how far it must be ahead.
    """

    name: str
    operation: Operation
    ranks: int
    helpers: int
    blocks: int
    owner: NDArray[np.int32]
    receiver: NDArray[np.int32]
    source: NDArray[np.int32]
    target: NDArray[np.int32]
    channel: NDArray[np.int32]
    steps: NDArray[np.int32]
    count: NDArray[np.int32]
    base: NDArray[np.int32]
    head: NDArray[np.int32]
    stride: NDArray[np.int32]
    modulus: NDArray[np.int32]
    adds: NDArray[np.int32]
    first: NDArray[np.int32]
    after: NDArray[np.int32]
    lag: NDArray[np.int32]

    @property
    def transfers(self) -> int:
        """Return the number of transfers."""
        return len(self.source)

    @property
    def waiter(self) -> NDArray[np.int32]:
        """Return the transfer that waits, for each dependency: int32 (dependencies,)."""
        return np.repeat(np.arange(self.transfers, dtype=np.int32), np.diff(self.first))

    def moved(self, transfer: int, step: int) -> NDArray[np.int64]:
        """Return the blocks that one step of a transfer moves, int64 (count,)."""
        start = int(self.head[transfer]) + int(self.stride[transfer]) * step
        return self.base[transfer] + (start + np.arange(self.count[transfer])) % self.modulus[transfer]

    def size(self, data: float) -> NDArray[np.float64]:
        """Return the bytes that each step of each transfer moves, where the collective is of ``data`` bytes.

        ``data`` is what NCCL's tests call size: the gradient for all_reduce and broadcast, all ranks' shards together
        for all_gather and reduce_scatter, what one rank sends, its own part included, for all_to_all.
        """
        whole = data * self.ranks if self.operation == "all_to_all" else data
        return self.count.astype(np.float64) * (whole / self.blocks)

    def sent(self, data: float) -> NDArray[np.float64]:
        """Return the bytes that leave each endpoint in all, float64 of shape (ranks + helpers,)."""
        return np.bincount(self.source, self.size(data) * self.steps, self.ranks + self.helpers).astype(np.float64)


def assembled(
    name: str,
    operation: Operation,
    ranks: int,
    blocks: int,
    source: ArrayLike,
    target: ArrayLike,
    head: ArrayLike,
    *,
    waiter: ArrayLike = _NONE,
    after: ArrayLike = _NONE,
    lag: ArrayLike = WHOLE,
    helpers: int = 0,
    owner: ArrayLike = (),
    receiver: ArrayLike = (),
    channel: ArrayLike = 0,
    steps: ArrayLike = 1,
    count: ArrayLike = 1,
    base: ArrayLike = 0,
    stride: ArrayLike = 0,
    modulus: ArrayLike | None = None,
    adds: ArrayLike = 0,
) -> Plan:
    """Build a plan from columns; scalars stand for columns. Dependencies are (waiter, after, lag), in any order."""
    modulus = blocks - np.asarray(base) if modulus is None else modulus
    given = (source, target, channel, steps, count, base, head, stride, modulus, adds)
    columns = [np.ascontiguousarray(column, np.int32) for column in np.broadcast_arrays(*given)]
    waiting, awaited, ahead = np.broadcast_arrays(*(np.asarray(c, np.int32) for c in (waiter, after, lag)))
    order = np.argsort(waiting, kind="stable")
    first = np.zeros(len(columns[0]) + 1, np.int32)
    np.cumsum(np.bincount(waiting, minlength=len(columns[0])), out=first[1:])
    return Plan(
        name,
        operation,
        ranks,
        helpers,
        blocks,
        np.asarray(owner, np.int32),
        np.asarray(receiver, np.int32),
        *columns,
        first=first,
        after=awaited[order],
        lag=ahead[order],
    )


@dataclass(slots=True)
class Draft:
    """Builder of a plan, transfer by transfer.

    `transfer` takes dependencies as (transfer, lag) pairs or plain transfers, which mean `WHOLE`.
    """

    name: str
    operation: Operation
    ranks: int
    blocks: int
    helpers: int = 0
    owner: Sequence[int] | NDArray[np.int32] = ()
    receiver: Sequence[int] | NDArray[np.int32] = ()
    _rows: list[tuple[int, ...]] = field(default_factory=list)
    _first: list[int] = field(default_factory=lambda: [0])
    _after: list[tuple[int, int]] = field(default_factory=list)

    def transfer(
        self,
        source: int,
        target: int,
        block: int,
        count: int = 1,
        *,
        adds: int = 0,
        after: Sequence[int | tuple[int, int]] = (),
        steps: int = 1,
        stride: int = 0,
        base: int = 0,
        modulus: int | None = None,
        channel: int = 0,
    ) -> int:
        """Add a transfer that begins with ``block`` (counted from ``base``), and return its index."""
        modulus = self.blocks - base if modulus is None else modulus
        self._rows.append((source, target, channel, steps, count, base, block, stride, modulus, adds))
        self._after += [(one, WHOLE) if isinstance(one, int) else one for one in after]
        self._first.append(len(self._after))
        return len(self._rows) - 1

    def plan(self) -> Plan:
        """Return the plan of the transfers added so far."""
        rows = np.array(self._rows, np.int32).reshape(-1, 10).T.copy()
        after = np.array(self._after, np.int32).reshape(-1, 2).T.copy()
        return Plan(
            self.name,
            self.operation,
            self.ranks,
            self.helpers,
            self.blocks,
            np.asarray(self.owner, np.int32),
            np.asarray(self.receiver, np.int32),
            *rows,
            first=np.array(self._first, np.int32),
            after=after[0],
            lag=after[1],
        )


class PlanProgress:
    """Count of ended steps. ``ended``, int64 (transfers,), is advanced by who owns the progress.

    Attributes:
        ended: steps of each transfer that have ended.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ended = np.zeros(plan.transfers, np.int64)
        self._waiter = plan.waiter
        self._most = plan.steps[plan.after]
        self._lag = plan.lag.astype(np.int64)

    @property
    def finished(self) -> bool:
        """Return whether all steps of all transfers have ended."""
        return bool((self.ended == self.plan.steps).all())

    def _lacking(self) -> NDArray[np.bool_]:
        """Return for each dependency whether its waiter's next step has to wait for it."""
        return self.ended[self.plan.after] < np.minimum(self._most, self.ended[self._waiter] + self._lag)

    def ready(self) -> NDArray[np.int64]:
        """Return the transfers whose next step may start, or has started.

        Raises:
            StallError: there is none, and not all have finished.
        """
        may = self.ended < self.plan.steps
        unfinished = may.any()
        may[self._waiter[self._lacking()]] = False
        if unfinished and not may.any():
            raise StallError(f"{self.plan.name} {self.plan.operation}: transfers wait for each other", self._waits())
        return np.flatnonzero(may)

    def _waits(self) -> list[str]:
        plan, unfinished = self.plan, self.ended < self.plan.steps

        def told(one: int) -> str:
            return f"transfer {one} ({plan.source[one]} -> {plan.target[one]})"

        held = np.flatnonzero(self._lacking() & unfinished[self._waiter])
        return [
            f"{told(self._waiter[i])} at step {self.ended[self._waiter[i]]} of {plan.steps[self._waiter[i]]} waits for"
            f" {told(plan.after[i])} at {self.ended[plan.after[i]]} of {plan.steps[plan.after[i]]}"
            for i in held.tolist()
        ]


def rounds(plan: Plan) -> Iterator[NDArray[np.int64]]:
    """Yield the transfers that make a step in each round of a world in which every step takes 1 and starts at once.

    Complexity: one sweep over the dependencies a round.
    """
    progress = PlanProgress(plan)
    while not progress.finished:
        ready = progress.ready()
        yield ready
        progress.ended[ready] += 1


def steps_on_critical_path(plan: Plan) -> int:
    """Return the length of the longest chain of dependent steps: the α that an algorithm costs."""
    return sum(1 for _ in rounds(plan))
