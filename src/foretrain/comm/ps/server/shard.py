"""Sums of one shard, in C++, and the interface of all shards: state machines without socket, clock or thread.

A worker pushes its next round of a part only when it has the sum of this one, so that at most two are in flight, and
each has one of the part's two buffers. A range that is pushed twice counts once, and is answered again if its sum is
there: a worker that does not know whether a push has arrived may repeat it.

# Note [Restarted shards]
The workers alone restore a shard that is lost: each resends its pushes of its round, and of the one before if others
may still lack sums of it. Sums are added by rank, and so have the same bits. A worker in round r + 1 has all sums of
round r, so all others have pushed it, and have all sums of round r − 1: no worker waits for those any more, and a round
that is overtaken may be dropped although it was never completed here.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

from foretrain.comm.collectives.plan import KINDS
from foretrain.comm.ps import wire
from foretrain.comm.ps.frames import Header, Malformed
from foretrain.comm.ps.placement import Declaration, Declared, Optimized, ShardPart
from foretrain.errors import ConfigError, Disagreement, ForetrainError

MOST_WORKERS: Final = 1024
"""Of one job."""
_KINDS: Final = tuple(KINDS)
_TOGETHER: Final = 64
"""Deliveries to fetch at once."""


class _Code(IntEnum):
    """Reason why a push is refused, as shard.h has it."""

    NO_PART = 1
    NO_RANGE = 2
    NO_SIZE = 3
    NO_ROUND = 4
    TOO_EARLY = 5
    DIFFERENT = 6


class _Round(NamedTuple):
    """Round of a part, and the bytes that each worker has yet to push, if any."""

    step: int
    missing: Mapping[int, int]


class Value(NamedTuple):
    """Sum of bytes ``[start, end)`` of a part in a round; ``data`` is None if no worker had a gradient."""

    part: int
    step: int
    start: int
    end: int
    data: memoryview | None


class Delivery(NamedTuple):
    """Value with the worker to send it to."""

    worker: int
    value: Value


class SumShard:
    """Sums of the parts that live here, in C++ (shard.h).

    Args:
        parts: of this shard.
        tasks: of the whole job.
        workers: N; their ranks are 0 to N − 1.
        lost: workers that push no more.
        restarted: whether this shard replaces one of a job under way, see Note [Restarted shards].

    Attributes:
        native: handle for a `foretrain.comm.ps.wire.Wire` that serves workers itself.

    Raises:
        ConfigError: there are more than `MOST_WORKERS`.
    """

    def __init__(
        self,
        parts: Iterable[ShardPart],
        tasks: Sequence[Declared],
        workers: int,
        lost: Iterable[int] = (),
        restarted: bool = False,
    ) -> None:
        if workers > MOST_WORKERS:
            raise ConfigError("workers", workers, "are too many for one job", f"start at most {MOST_WORKERS}")
        self._parts = {part.number: part for part in parts}
        self._tasks, self._workers, self._lost = tasks, workers, set(lost)
        declared = [(part, tasks[part.task]) for part in self._parts.values()]
        numbers = [(part.number, part.size, _KINDS.index(task.dtype), task.urgency) for part, task in declared]
        gone, flat = sorted(self._lost), [number for each in numbers for number in each]
        self._library = wire.libraries()[1]
        self.native = self._library.foretrain_shard_new(
            workers, restarted, wire.numbers(gone), len(gone), wire.numbers(flat), len(numbers)
        )
        weakref.finalize(self, self._library.foretrain_shard_delete, self.native).atexit = False
        self._sums: dict[tuple[int, int], memoryview] = {}
        self._detail = ctypes.c_int64()

    def push(
        self,
        worker: int,
        part: int,
        step: int,
        offset: int,
        size: int,
        data: memoryview | None,
        again: bool = False,
        held: bool = False,
    ) -> list[Delivery]:
        """Add ``size`` bytes from ``offset`` on, pushed by ``worker``; return the sums to send now.

        ``data`` is None if it has no gradient; ``again``: the round adds to the sums of the one before; ``held``: the
        worker gets sums only when it pulls them. Sums of bytes that it has pushed before are sent to it once more.

        Raises:
            Malformed: there are no such bytes here, they do not align, or the round cannot have begun.
            Disagreement: workers differ in ``again``.
        """
        where, length = (None, 0) if data is None else (wire.address(data), len(data))
        given = worker, part, step, offset, size, where, length, again, held
        code = self._library.foretrain_shard_push(self.native, *given, ctypes.byref(self._detail))
        if code:
            raise self._error(_Code(code), worker, part, step, offset, size, length, again)
        return self._deliveries()

    def pull(self, worker: int, part: int, step: int, offset: int, size: int) -> list[Delivery]:
        """Return the sums that ``worker`` asks for and that exist; the others are delivered when they do.

        Raises:
            Malformed: there are no such bytes here, or no worker has pushed to that round.
        """
        if self._library.foretrain_shard_pull(self.native, worker, part, step, offset, size):
            raise Malformed("pull", f"a pull of {size} bytes at {offset} of part {part} in round {step}")
        return self._deliveries()

    def remove_worker(self, worker: int) -> list[Delivery]:
        """Remove ``worker``, which is lost; return the sums that this completes."""
        self._lost.add(worker)
        self._library.foretrain_shard_remove_worker(self.native, worker)
        return self._deliveries()

    def worker_closed(self, worker: int) -> list[Delivery]:
        """Return nothing: a worker that closes has pushed all rounds that it took part in."""
        return []

    def answer_message(self, worker: int, header: Header, payload: memoryview) -> Iterable[tuple[Header, bytes]]:
        """Reject optimizer messages."""
        raise Malformed("mode", f"{header.kind.name} of worker {worker}, where only sums are made")

    def blocking_round(self, worker: int) -> int | None:
        """Return the round that others are in and that lacks pushes of ``worker``; None if there is none."""
        for part in self._parts:
            latest = max(self._rounds(part), default=None, key=lambda each: each.step)
            if latest is not None and worker in latest.missing:
                return latest.step
        return None

    def round_complete(self, step: int) -> bool:
        """Return whether all sums of round ``step`` exist."""
        return all(
            any(each.step > step or (each.step == step and not each.missing) for each in self._rounds(part))
            for part in self._parts
        )

    def waiting(self) -> list[str]:
        """Return a line on the missing workers for each part in progress."""
        lines = []
        for number, part in self._parts.items():
            for step, missing in self._rounds(number):
                if missing and len(missing) < self._workers - len(self._lost):
                    who = ", ".join(f"worker {worker} ({left} bytes)" for worker, left in missing.items())
                    lines.append(f"round {step}: part of task {self._tasks[part.task].name!r} waits for {who}")
        return lines

    def _rounds(self, part: int) -> Iterator[_Round]:
        """Yield a part's rounds, of which there are at most two."""
        missing = (ctypes.c_int64 * self._workers)()
        for which in range(2):
            step = self._library.foretrain_shard_round(self.native, part, which, self._workers, missing)
            if step >= 0:
                yield _Round(step, {worker: left for worker, left in enumerate(missing) if left})

    def _deliveries(self) -> list[Delivery]:
        found: list[Delivery] = []
        many = (ctypes.c_int64 * (6 * _TOGETHER))()
        while count := self._library.foretrain_shard_deliveries(self.native, many, _TOGETHER):
            numbers = iter(many[: 6 * count])
            for worker, part, step, start, end, absent in zip(*[numbers] * 6, strict=True):
                data = None if absent else self._sum(part, step & 1)[start:end]
                found.append(Delivery(worker, Value(part, step, start, end, data)))
        return found

    def _sum(self, part: int, which: int) -> memoryview:
        """Return a part's sums in rounds of this parity."""
        if (part, which) not in self._sums:
            where = self._library.foretrain_shard_sums(self.native, part, which)
            whole = (ctypes.c_char * self._parts[part].size).from_address(where)
            whole.shard = self  # pyright: ignore[reportAttributeAccessIssue] whose memory it is
            self._sums[part, which] = memoryview(whole).cast("B")
        return self._sums[part, which]

    def _error(
        self, code: _Code, worker: int, part: int, step: int, offset: int, size: int, length: int, again: bool
    ) -> ForetrainError:
        if code is _Code.NO_PART:
            return Malformed("part", f"part {part} does not live here")
        if code is _Code.NO_RANGE:
            return Malformed("range", f"{size} bytes at {offset} of part {part}, which has {self._parts[part].size}")
        if code is _Code.NO_SIZE:
            return Malformed("size", f"{length} bytes where {size} are announced")
        if code is _Code.NO_ROUND:
            return Malformed("round", f"round {step} of part {part}, which is in round {self._detail.value}")
        if code is _Code.TOO_EARLY:
            before = f"before round {self._detail.value} is complete"
            return Malformed("round", f"round {step} of part {part} {before}")
        how = "again before step()" if again else "once"
        return Disagreement(
            f"in round {step} worker {worker} ran backward() {how}, and others did not; run it equally often on "
            "all, or all but the last under no_sync(), and read .grad in between on all or on none"
        )


class Mode(Protocol):
    """Interface of shards: methods return the values to send now."""

    def push(
        self,
        worker: int,
        part: int,
        step: int,
        offset: int,
        size: int,
        data: memoryview | None,
        again: bool = False,
        held: bool = False,
    ) -> list[Delivery]:
        """Add bytes that ``worker`` has pushed in a round; see `SumShard.push`."""
        ...

    def pull(self, worker: int, part: int, step: int, offset: int, size: int) -> list[Delivery]:
        """Return the values of these bytes for ``worker``."""
        ...

    def remove_worker(self, worker: int) -> list[Delivery]:
        """Remove ``worker``, which is lost."""
        ...

    def worker_closed(self, worker: int) -> list[Delivery]:
        """Note that ``worker`` closes in good order."""
        ...

    def answer_message(self, worker: int, header: Header, payload: memoryview) -> Iterable[tuple[Header, bytes]]:
        """Handle a message other than gradients; return the answers to ``worker`` alone."""
        ...

    def blocking_round(self, worker: int) -> int | None:
        """Return the round that others are in and that lacks pushes of ``worker``; None if there is none."""
        ...

    def round_complete(self, step: int) -> bool:
        """Return whether all rounds up to ``step`` are complete in all parts."""
        ...

    def waiting(self) -> Sequence[str]:
        """Return a line on each missing worker or part."""
        ...


OptimizerShardFactory = Callable[[Iterable[ShardPart], Sequence[Declared], Optimized, int, Iterable[int]], Mode]
"""Function of parts, all tasks, their optimizers, the workers and lost ranks to a shard that updates parameters. A
framework's plugin provides it, as the optimizers are the framework's own."""


def mode(
    declaration: Declaration,
    parts: Iterable[ShardPart],
    workers: int,
    lost: Iterable[int],
    restarted: bool = False,
    optimizer_shard: OptimizerShardFactory | None = None,
) -> Mode:
    """Return the shard for ``parts`` of a declared job: a `SumShard`, or what ``optimizer_shard`` makes.

    Raises:
        ConfigError: optimizers are declared and ``optimizer_shard`` is None.
    """
    if declaration.optimized is None:
        return SumShard(parts, declaration.tasks, workers, lost, restarted)
    if optimizer_shard is None:
        remedy = "start it with foretrain server where PyTorch is installed, or write updates='workers'"
        raise ConfigError("updates", "servers", "is declared, and this server runs no optimizers", remedy)
    return optimizer_shard(parts, declaration.tasks, declaration.optimized, workers, lost)
