"""Shard that updates: gradients arrive, parameters return. A state machine without socket, clock or thread.

    push ──▶ `turns`: until all of a part is there ──▶ `masters`: its optimizer ──▶ `staleness`: who may have the answer

In BSP a part's turn is all workers' together: the sum of what they push, already divided by N, is the mean that
DistributedDataParallel would apply. Asynchronously each worker has turns of its own. In both a part is updated when its
turn is complete, whatever the others of its tensor wait for, and whoever waits for it has it at once or, under SSP,
when the slowest has come near enough. Each push counts once, by worker, step and range: what is pushed again is
answered again, with the parameters as they are now.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from foretrain.comm.ps.consistency import Clocks, consistency
from foretrain.comm.ps.frames import FrameKind, Header, Malformed
from foretrain.comm.ps.hyperparameters import Hyperparameters
from foretrain.comm.ps.hyperparameters import decode as read_rule
from foretrain.comm.ps.placement import WIDTHS, Declared, Optimized, ShardPart
from foretrain.comm.ps.server.coverage import Range
from foretrain.comm.ps.server.shard import Delivery, Value
from foretrain.comm.ps.server.sums import PendingUpdate
from foretrain.errors import Disagreement
from foretrain.plugins.torch.ps.server.parameter_store import ParameterStore, decode, encode

_FRAMES = 16
"""Frames of a part at most: no optimizer keeps so many tensors."""


class OptimizerShard:
    """Parts that live here, and their optimizers; see `foretrain.comm.ps.server.shard.Mode`.

    Args:
        parts: of this shard.
        tasks: of the whole job.
        optimized: what is updated how.
        workers: N; their ranks are 0 to N − 1.
        lost: those that push no more.
    """

    def __init__(
        self,
        parts: Iterable[ShardPart],
        tasks: Sequence[Declared],
        optimized: Optimized,
        workers: int,
        lost: Iterable[int] = (),
    ) -> None:
        self._parts = {part.number: part for part in parts}
        self._tasks, self._workers, self._classes = tasks, workers, len(optimized.classes)
        self._living = set(range(workers)) - set(lost)
        self._apart, bound = consistency(optimized.consistency)
        self._masters = ParameterStore(self._parts.values(), tasks, optimized)
        self._clocks = Clocks(self._parts, workers, bound, lost)
        self._rules = Hyperparameters(workers)
        self._turns: dict[tuple[int, int], PendingUpdate] = {}
        """By part, and worker where each has its own."""
        self._wanted: dict[int, dict[int, tuple[int, list[Range]]]] = {part: {} for part in self._parts}
        """By part and worker: of which of its steps it wants which answers."""
        self._unchanged: dict[int, int] = {}
        """By part: the step to which nobody had a gradient, if that is its last."""
        self._seeds: dict[int, list[bytes]] = {}
        self._sum = memoryview(bytearray(max((part.size for part in self._parts.values()), default=0)))

    # ── gradients ──

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
        """Add ``size`` bytes from ``offset`` on, pushed by ``worker``; ``data`` is None if it has no gradient.

        Raises:
            Malformed: there are no such bytes here, they do not align, or the step cannot have begun.
            Disagreement: it adds to a step that was applied.
            ForetrainError: the optimizer failed.
        """
        here = self._check(part, offset, size)
        if data is not None and len(data) != size:
            raise Malformed("size", f"{len(data)} bytes where {size} are announced")
        if again:
            raise Disagreement(f"worker {worker} ran backward() again before step(), and servers have updated already")
        done = self._clocks.done(worker, part)
        if not 0 <= step <= done + 1:
            raise Malformed("round", f"round {step} of part {part}, in which worker {worker} has had {done + 1}")
        if step < max(done, self._wanted[part].get(worker, (-1, []))[0]):
            return []
        if not held:
            self._want(worker, part, step, (offset, offset + size))
        if step == done:
            return self._answers(part)
        lane = part, worker if self._apart else 0
        turn = self._turns.get(lane)
        if turn is None:
            turn = self._turns[lane] = PendingUpdate(here.size, 1 << worker if self._apart else self._mask())
        turn.add(worker, offset, offset + size, data)
        return self._complete(here, worker, step, turn) if turn.whole else []

    def pull(self, worker: int, part: int, step: int, offset: int, size: int) -> list[Delivery]:
        """Return the parameters for these bytes, whose gradients ``worker`` has pushed in ``step``.

        Raises:
            Malformed: there are no such bytes here, or it has not pushed them.
        """
        self._check(part, offset, size)
        if not self._clocks.done(worker, part) <= step <= self._clocks.done(worker, part) + 1:
            raise Malformed("pull", f"a pull of {size} bytes at {offset} of part {part} in round {step}")
        self._want(worker, part, step, (offset, offset + size))
        return self._answers(part)

    def remove_worker(self, worker: int) -> list[Delivery]:
        """Remove ``worker``, which is lost; return the updates that the others' pushes complete."""
        self._living.discard(worker)
        deliveries = []
        for (part, owner), turn in list(self._turns.items()):
            if self._apart and owner == worker:
                del self._turns[part, owner]
            elif not self._apart and self._living:
                turn.remove_worker(worker)
                if turn.whole:
                    first = min(self._living)
                    step = self._clocks.done(first, part) + 1
                    deliveries += self._complete(self._parts[part], first, step, turn)
        for wanted in self._wanted.values():
            wanted.pop(worker, None)
        return deliveries + self._unblock(worker)

    def worker_closed(self, worker: int) -> list[Delivery]:
        """Stop waiting for ``worker``, which closes."""
        return self._unblock(worker)

    def blocking_round(self, worker: int) -> int | None:
        """Return the round that others are in and that lacks pushes of ``worker``; None if there is none."""
        waiting = [part for (part, _), turn in self._turns.items() if not self._apart and worker in turn.missing()]
        return self._clocks.done(worker, waiting[0]) + 1 if waiting else None

    def round_complete(self, step: int) -> bool:
        """Return whether round ``step`` was applied to all parts; asynchronously nobody waits for that."""
        return self._apart or all(self._clocks.rounds[worker] > step for worker in self._living)

    def waiting(self) -> list[str]:
        """Return who is waited for, one line for each part in progress."""
        lines = []
        for (part, _), turn in self._turns.items():
            missing = turn.missing()
            if missing and not self._apart and len(missing) < len(self._living):
                who = ", ".join(f"worker {worker} ({left} bytes)" for worker, left in missing.items())
                step = self._clocks.done(min(self._living), part) + 1
                lines.append(f"round {step}: part of task {self._name(part)!r} waits for {who}")
        for part, wanted in self._wanted.items():
            for worker, (step, _) in wanted.items():
                if self._apart and step <= self._clocks.done(worker, part):
                    who = ", ".join(map(str, self._clocks.behind(part, step)))
                    lines.append(f"step {step} of worker {worker}: task {self._name(part)!r} waits for worker {who}")
        return lines

    def _name(self, part: int) -> str:
        return self._tasks[self._parts[part].task].name

    # ── everything else that workers say ──

    def answer_message(self, worker: int, header: Header, payload: memoryview) -> Iterator[tuple[Header, bytes]]:
        """Return the answers to a RULE, INIT or GET_STATE of ``worker``; `Malformed` if it makes no sense."""
        if header.kind is FrameKind.RULE:
            groups = read_rule(bytes(payload))
            if len(groups) != self._classes:
                raise Malformed("rule", f"hyperparameters of {len(groups)} groups instead of {self._classes}")
            self._rules.say(worker, header.step, groups)
        elif header.kind is FrameKind.INIT:
            if self._seed(worker, header, bytes(payload)):
                yield Header(FrameKind.STATE, part=header.part), b""
        elif header.kind is FrameKind.GET_STATE:
            if not self._masters.seeded(header.part):
                raise Malformed("fetch", f"part {header.part}, of which nothing is known")
            frames = encode(self._masters.contents(header.part))
            for number, frame in enumerate(frames):
                yield header._replace(kind=FrameKind.STATE, step=number, offset=len(frames), size=len(frame)), frame

    def _seed(self, worker: int, header: Header, frame: bytes) -> bool:
        """Take initial state; return whether all of a part is known now."""
        frames = self._seeds.setdefault(header.part, [])
        if worker != 0 or header.part not in self._parts or not header.step < header.offset <= _FRAMES:
            raise Malformed("seed", f"frame {header.step} of {header.offset} of part {header.part} by worker {worker}")
        if header.step == 0:
            frames.clear()
        if header.step != len(frames):
            raise Malformed("seed", f"frame {header.step} of part {header.part} after {len(frames)}")
        frames.append(frame)
        if len(frames) < header.offset:
            return False
        # What was updated since is not to be undone by a seed that is said again.
        if all(self._clocks.done(other, header.part) < 0 for other in range(self._workers)):
            self._masters.load(header.part, decode(frames))
        del self._seeds[header.part]
        return True

    # ── state ──

    @property
    def begun(self) -> bool:
        """Return whether the complete initial state has arrived."""
        return all(self._masters.seeded(part) or self._masters.group_of(part) < 0 for part in self._parts)

    @property
    def living(self) -> Collection[int]:
        """Return the workers that are not lost."""
        return self._living

    @property
    def left(self) -> Collection[int]:
        """Return the workers that have closed, and live."""
        return [worker for worker in self._living if not self._clocks.waited_for(worker)]

    @property
    def done(self) -> Sequence[int]:
        """Return by worker how many of its rounds were applied to all parts."""
        return self._clocks.rounds

    def state(self) -> dict[str, Any]:
        """Return everything that was applied, as plain numbers and its own tensors; pushes in flight are sent again."""
        return {
            "masters": self._masters.state(),
            "clocks": self._clocks.state(),
            "rules": self._rules.state(),
            "unchanged": dict(self._unchanged),
            "living": sorted(self._living),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state` returned, with nothing in flight."""
        self._masters.restore(state["masters"])
        self._clocks.restore(state["clocks"])
        self._rules.restore(state["rules"])
        self._unchanged = dict(state["unchanged"])
        self._living &= set(state["living"])
        self._turns.clear()
        self._wanted = {part: {} for part in self._parts}

    # ── updates and answers ──

    def _check(self, part: int, offset: int, size: int) -> ShardPart:
        here = self._parts.get(part)
        if here is None:
            raise Malformed("part", f"part {part} does not live here")
        width = WIDTHS[self._tasks[here.task].dtype]
        if not 0 < size <= here.size - offset or offset % width or size % width:
            raise Malformed("range", f"{size} bytes at {offset} of part {part}, which has {here.size}")
        return here

    def _mask(self) -> int:
        return sum(1 << worker for worker in self._living)

    def _complete(self, here: ShardPart, worker: int, step: int, turn: PendingUpdate) -> list[Delivery]:
        """Update ``here`` with ``turn``, which is complete, and return it to the workers that wait for it."""
        part, out = here.number, self._sum[: here.size]
        dtype = self._tasks[here.task].dtype
        members = [worker] if self._apart else sorted(self._living)
        scale = 1.0 if self._apart else self._workers / len(members)
        self._unchanged.pop(part, None)
        some, updated = turn.total(dtype, scale, out), self._masters.group_of(part) >= 0
        groups = self._rules.of(members[0], step) if updated else []
        if updated and (groups is None or not self._masters.seeded(part)):
            raise Malformed("seed", f"part {part} is pushed before its parameters and rules were said")
        if some and groups:
            self._masters.update(part, torch.frombuffer(out, dtype=getattr(torch, dtype)), groups)
        elif not self._apart or self._masters.group_of(part) < 0:
            self._unchanged[part] = step
        del self._turns[part, worker if self._apart else 0]
        for member in members:
            self._clocks.tick(member, part)
        return self._answers(part)

    def _want(self, worker: int, part: int, step: int, wanted: Range) -> None:
        before, ranges = self._wanted[part].get(worker, (step, []))
        self._wanted[part][worker] = (step, _merged([*(ranges if before == step else []), wanted]))

    def _answers(self, part: int) -> list[Delivery]:
        """Return the ranges of ``part`` that are asked for and may be given."""
        deliveries = []
        for worker, (step, ranges) in list(self._wanted[part].items()):
            if self._clocks.may_go_on(worker, part, step):
                del self._wanted[part][worker]
                deliveries += [Delivery(worker, self._value(part, step, *each)) for each in ranges]
        return deliveries

    def _value(self, part: int, step: int, start: int, end: int) -> Value:
        same = part in self._unchanged and (self._apart or self._unchanged[part] == step)
        return Value(part, step, start, end, None if same else self._masters.answer(part, start, end))

    def _unblock(self, worker: int) -> list[Delivery]:
        self._clocks.leave(worker)
        return [delivery for part in self._parts for delivery in self._answers(part)]


def _merged(ranges: list[Range]) -> list[Range]:
    """Return ``ranges`` in order, with neighbouring and overlapping ones joined."""
    found: list[Range] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found
