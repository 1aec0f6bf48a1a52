"""The shard of sums in Python: an oracle for the compiled one, and the base of one that keeps parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from foretrain.comm.ps.frames import Header, Malformed
from foretrain.comm.ps.placement import WIDTHS, Declared, ShardPart
from foretrain.comm.ps.server.shard import Delivery, Value
from foretrain.comm.ps.server.sums import Coverage, Pushed, Range, add_up
from foretrain.errors import Disagreement


class _Round:
    """Round of one part."""

    __slots__ = ("absent", "again", "coverage", "held", "pulls", "pushed", "step")

    def __init__(self, step: int, again: bool, size: int, group: int, workers: int) -> None:
        self.step, self.again = step, again
        self.coverage = Coverage(size, group)
        self.pushed: list[list[Pushed]] = [[] for _ in range(workers)]
        self.absent: list[Range] = []
        """Ranges for which no worker had a gradient."""
        self.held = 0
        """Bit mask of the workers that get only what they pull."""
        self.pulls: list[tuple[int, Range]] = []
        """Pulls of workers."""


class _Held:
    """Part with at most two rounds, and the buffers of their sums."""

    __slots__ = ("buffers", "declared", "part", "rounds")

    def __init__(self, part: ShardPart, declared: Declared) -> None:
        self.part, self.declared = part, declared
        self.rounds: list[_Round | None] = [None, None]
        self.buffers = [memoryview(bytearray(part.size)) for _ in range(2)]

    @property
    def latest(self) -> int:
        """Return the latest round with a push; −1 before the first."""
        first, second = self.rounds
        return max(first.step if first else -1, second.step if second else -1)


class PythonSumShard:
    """Sums of the parts that live here.

    Args:
        parts: of this shard.
        tasks: of the whole job.
        workers: N; their ranks are 0 to N − 1.
        lost: workers that push no more.
        restarted: whether this shard replaces one of a job under way, see Note [Restarted shards].
    """

    def __init__(
        self,
        parts: Iterable[ShardPart],
        tasks: Sequence[Declared],
        workers: int,
        lost: Iterable[int] = (),
        restarted: bool = False,
    ) -> None:
        self._held = {part.number: _Held(part, tasks[part.task]) for part in parts}
        self._workers, self._restarted = workers, restarted
        self._group = (1 << workers) - 1 & ~sum(1 << rank for rank in lost)

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
        here = self._held.get(part)
        if here is None:
            raise Malformed("part", f"part {part} does not live here")
        width, whole = WIDTHS[here.declared.dtype], here.part.size
        if not 0 < size <= whole - offset or offset % width or size % width:
            raise Malformed("range", f"{size} bytes at {offset} of part {part}, which has {whole}")
        if data is not None and len(data) != size:
            raise Malformed("size", f"{len(data)} bytes where {size} are announced")
        latest = here.latest
        if not latest - 1 <= step <= latest + 1 + self._restarted and latest >= 0:
            if step < latest:
                return []
            raise Malformed("round", f"round {step} of part {part}, which is in round {latest}")
        found = here.rounds[step & 1]
        if found is None or found.step < step:
            if found is not None and not found.coverage.whole and not self._restarted:
                raise Malformed("round", f"round {step} of part {part} before round {found.step} is complete")
            found = here.rounds[step & 1] = _Round(step, again, whole, self._group, self._workers)
        elif found.step > step:
            return []
        if found.again != again:
            how = "again before step()" if again else "once"
            raise Disagreement(
                f"in round {step} worker {worker} ran backward() {how}, and others did not; run it equally often on "
                "all, or all but the last under no_sync(), and read .grad in between on all or on none"
            )
        if held:
            found.held |= 1 << worker
        return self._add(here, found, worker, offset, offset + size, data)

    def pull(self, worker: int, part: int, step: int, offset: int, size: int) -> list[Delivery]:
        """Return the sums that ``worker`` asks for and that exist; the others are delivered when they do.

        Raises:
            Malformed: there are no such bytes here, or no worker has pushed to that round.
        """
        here = self._held.get(part)
        found = here and here.rounds[step & 1]
        if here is None or found is None or found.step != step or not 0 < size <= here.part.size - offset:
            raise Malformed("pull", f"a pull of {size} bytes at {offset} of part {part} in round {step}")
        wanted = (offset, offset + size)
        found.pulls.append((worker, wanted))
        return [
            Delivery(worker, value)
            for low, high in found.coverage.complete(*wanted)
            for value in self._values(here, found, low, high)
        ]

    def remove_worker(self, worker: int) -> list[Delivery]:
        """Remove ``worker``, which is lost; return the sums that this completes."""
        self._group &= ~(1 << worker)
        return [
            delivery
            for held in self._held.values()
            for found in sorted(filter(None, held.rounds), key=lambda each: each.step)
            for start, end in found.coverage.remove_worker(worker)
            for delivery in self._deliver(found, self._sum(held, found, start, end))
        ]

    def worker_closed(self, worker: int) -> list[Delivery]:
        """Return nothing: a worker that closes has pushed all rounds that it took part in."""
        return []

    def answer_message(self, worker: int, header: Header, payload: memoryview) -> Iterable[tuple[Header, bytes]]:
        """Reject optimizer messages."""
        raise Malformed("mode", f"{header.kind.name} of worker {worker}, where only sums are made")

    def blocking_round(self, worker: int) -> int | None:
        """Return the round that others are in and that lacks pushes of ``worker``; None if there is none."""
        for held in self._held.values():
            found = held.rounds[held.latest & 1]
            if found is not None and worker in found.coverage.missing():
                return found.step
        return None

    def round_complete(self, step: int) -> bool:
        """Return whether all sums of round ``step`` exist."""
        return all(
            any(
                found is not None and (found.step > step or (found.step == step and found.coverage.whole))
                for found in held.rounds
            )
            for held in self._held.values()
        )

    def waiting(self) -> list[str]:
        """Return a line on the missing workers for each part in progress."""
        lines = []
        for held in self._held.values():
            for found in filter(None, held.rounds):
                missing = found.coverage.missing()
                if missing and len(missing) < self._group.bit_count():
                    who = ", ".join(f"worker {worker} ({left} bytes)" for worker, left in missing.items())
                    lines.append(f"round {found.step}: part of task {held.declared.name!r} waits for {who}")
        return lines

    def _add(
        self, held: _Held, found: _Round, worker: int, start: int, end: int, data: memoryview | None
    ) -> list[Delivery]:
        new, complete = found.coverage.add(worker, start, end)
        deliveries: list[Delivery] = []
        if new != [(start, end)] and not found.held >> worker & 1:
            deliveries += [
                Delivery(worker, value)
                for first, last in _between(new, start, end)
                for low, high in found.coverage.complete(first, last)
                for value in self._values(held, found, low, high)
            ]
        if data is not None:
            for low, high in new:
                found.pushed[worker].append(Pushed(low, data[low - start : high - start]))
        for low, high in complete:
            deliveries += self._deliver(found, self._sum(held, found, low, high))
        if found.coverage.whole and complete:
            # Free the frames of the pushes; sums have a buffer of their own.
            found.pushed = [[] for _ in range(self._workers)]
        return deliveries

    def _deliver(self, found: _Round, value: Value) -> Iterator[Delivery]:
        """Yield ``value``, just summed, for each worker that gets it now."""
        for worker in range(self._workers):
            if self._group >> worker & 1 and not found.held >> worker & 1:
                yield Delivery(worker, value)
        for worker, (start, end) in found.pulls:
            low, high = max(start, value.start), min(end, value.end)
            if low < high:
                data = None if value.data is None else value.data[low - value.start : high - value.start]
                yield Delivery(worker, value._replace(start=low, end=high, data=data))

    def _sum(self, held: _Held, found: _Round, start: int, end: int) -> Value:
        counted = [pushed if self._group >> worker & 1 else [] for worker, pushed in enumerate(found.pushed)]
        out, scale = held.buffers[found.step & 1], self._workers / self._group.bit_count()
        if add_up(counted, start, end, held.declared.dtype, out, scale):
            return Value(held.part.number, found.step, start, end, out[start:end])
        found.absent.append((start, end))
        return Value(held.part.number, found.step, start, end, None)

    def _values(self, held: _Held, found: _Round, start: int, end: int) -> Iterator[Value]:
        """Yield the sums of ``[start, end)`` in order, apart from ranges without any gradient."""
        index, step, out = held.part.number, found.step, held.buffers[found.step & 1]
        for low, high in sorted(found.absent):
            if low >= end or high <= start:
                continue
            if start < low:
                yield Value(index, step, start, low, out[start:low])
            yield Value(index, step, max(start, low), min(end, high), None)
            start = min(end, high)
        if start < end:
            yield Value(index, step, start, end, out[start:end])


def _between(ranges: Sequence[Range], start: int, end: int) -> Iterator[Range]:
    """Yield what ``ranges``, in order, leave of ``[start, end)``."""
    for low, high in ranges:
        if start < low:
            yield start, low
        start = high
    if start < end:
        yield start, end
