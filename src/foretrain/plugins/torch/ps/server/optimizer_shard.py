"""Shard that runs optimizers: gradients arrive, parameters return. A state machine without socket, clock or thread.

    push ──▶ `PendingUpdate`: until a part is complete ──▶ `ParameterStore`: its optimizer ──▶ `Clocks`: who gets it

In BSP all workers share a part's update: the sum of their pushes, already divided by N, is the mean that
DistributedDataParallel would apply. Asynchronously each worker has updates of its own. In both a part is updated when
its update is complete, without waiting for other parts of its tensor, and is sent to waiting workers at once or, under
SSP, when the slowest worker is close enough. Each push counts once, by worker, step and range: a repeated push is
answered with the current parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from foretrain.comm.ps.consistency import Clocks, Hyperparameters, consistency, decode_groups
from foretrain.comm.ps.frames import FrameKind, Header, Malformed
from foretrain.comm.ps.placement import WIDTHS, Declared, Optimized, ShardPart
from foretrain.comm.ps.server.shard import Delivery, Value
from foretrain.comm.ps.server.sums import PendingUpdate, Range
from foretrain.errors import Disagreement
from foretrain.plugins.torch.ps.server.parameter_store import ParameterStore, decode, encode

_FRAMES = 16
"""Most frames of a part: no optimizer keeps so many tensors."""


class OptimizerShard:
    """Parts of one shard and their optimizers; see `foretrain.comm.ps.server.shard.Mode`.

    Args:
        parts: of this shard.
        tasks: of the whole job.
        optimized: the optimizer of each task.
        workers: N; their ranks are 0 to N − 1.
        lost: workers that are lost already.
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
        self._asynchronous, bound = consistency(optimized.consistency)
        self._store = ParameterStore(self._parts.values(), tasks, optimized)
        self._clocks = Clocks(self._parts, workers, bound, lost)
        self._hyperparameters = Hyperparameters(workers)
        self._pending: dict[tuple[int, int], PendingUpdate] = {}
        """By part, and asynchronously by worker."""
        self._requests: dict[int, dict[int, tuple[int, list[Range]]]] = {part: {} for part in self._parts}
        """By part and worker: the worker's step, and the ranges of parameters that it waits for."""
        self._unchanged: dict[int, int] = {}
        """By part: its last step if no worker had a gradient in it."""
        self._initial_frames: dict[int, list[bytes]] = {}
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
        if step < max(done, self._requests[part].get(worker, (-1, []))[0]):
            return []
        if not held:
            self._request(worker, part, step, (offset, offset + size))
        if step == done:
            return self._answers(part)
        lane = part, worker if self._asynchronous else 0
        update = self._pending.get(lane)
        if update is None:
            update = self._pending[lane] = PendingUpdate(here.size, 1 << worker if self._asynchronous else self._mask())
        update.add(worker, offset, offset + size, data)
        return self._complete(here, worker, step, update) if update.whole else []

    def pull(self, worker: int, part: int, step: int, offset: int, size: int) -> list[Delivery]:
        """Return the parameters for these bytes, whose gradients ``worker`` has pushed in ``step``.

        Raises:
            Malformed: there are no such bytes here, or it has not pushed them.
        """
        self._check(part, offset, size)
        if not self._clocks.done(worker, part) <= step <= self._clocks.done(worker, part) + 1:
            raise Malformed("pull", f"a pull of {size} bytes at {offset} of part {part} in round {step}")
        self._request(worker, part, step, (offset, offset + size))
        return self._answers(part)

    def remove_worker(self, worker: int) -> list[Delivery]:
        """Remove ``worker``, which is lost; return the updates that the others' pushes complete."""
        self._living.discard(worker)
        deliveries = []
        for (part, owner), update in list(self._pending.items()):
            if self._asynchronous and owner == worker:
                del self._pending[part, owner]
            elif not self._asynchronous and self._living:
                update.remove_worker(worker)
                if update.whole:
                    first = min(self._living)
                    step = self._clocks.done(first, part) + 1
                    deliveries += self._complete(self._parts[part], first, step, update)
        for wanted in self._requests.values():
            wanted.pop(worker, None)
        return deliveries + self._stop_waiting_for(worker)

    def worker_closed(self, worker: int) -> list[Delivery]:
        """Stop waiting for ``worker``, which closes."""
        return self._stop_waiting_for(worker)

    def blocking_round(self, worker: int) -> int | None:
        """Return the round that others are in and that lacks pushes of ``worker``; None if there is none."""
        waiting = [
            part for (part, _), update in self._pending.items() if not self._asynchronous and worker in update.missing()
        ]
        return self._clocks.done(worker, waiting[0]) + 1 if waiting else None

    def round_complete(self, step: int) -> bool:
        """Return whether round ``step`` was applied to all parts; asynchronously nobody waits for that."""
        return self._asynchronous or all(self._clocks.rounds[worker] > step for worker in self._living)

    def waiting(self) -> list[str]:
        """Return a line on the missing workers of each part in progress."""
        lines = []
        for (part, _), update in self._pending.items():
            missing = update.missing()
            if missing and not self._asynchronous and len(missing) < len(self._living):
                who = ", ".join(f"worker {worker} ({left} bytes)" for worker, left in missing.items())
                step = self._clocks.done(min(self._living), part) + 1
                lines.append(f"round {step}: part of task {self._name(part)!r} waits for {who}")
        for part, wanted in self._requests.items():
            for worker, (step, _) in wanted.items():
                if self._asynchronous and step <= self._clocks.done(worker, part):
                    who = ", ".join(map(str, self._clocks.behind(part, step)))
                    lines.append(f"step {step} of worker {worker}: task {self._name(part)!r} waits for worker {who}")
        return lines

    def _name(self, part: int) -> str:
        return self._tasks[self._parts[part].task].name

    # ── other messages of workers ──

    def answer_message(self, worker: int, header: Header, payload: memoryview) -> Iterator[tuple[Header, bytes]]:
        """Return the answers to a RULE, INIT or GET_STATE of ``worker``; `Malformed` if it makes no sense."""
        if header.kind is FrameKind.RULE:
            groups = decode_groups(bytes(payload))
            if len(groups) != self._classes:
                raise Malformed("rule", f"hyperparameters of {len(groups)} groups instead of {self._classes}")
            self._hyperparameters.say(worker, header.step, groups)
        elif header.kind is FrameKind.INIT:
            if self._take_initial_state(worker, header, bytes(payload)):
                yield Header(FrameKind.STATE, part=header.part), b""
        elif header.kind is FrameKind.GET_STATE:
            if not self._store.seeded(header.part):
                raise Malformed("fetch", f"part {header.part}, of which nothing is known")
            frames = encode(self._store.contents(header.part))
            for number, frame in enumerate(frames):
                yield header._replace(kind=FrameKind.STATE, step=number, offset=len(frames), size=len(frame)), frame

    def _take_initial_state(self, worker: int, header: Header, frame: bytes) -> bool:
        """Take a frame of initial state; return whether the part is complete now."""
        frames = self._initial_frames.setdefault(header.part, [])
        if worker != 0 or header.part not in self._parts or not header.step < header.offset <= _FRAMES:
            raise Malformed("seed", f"frame {header.step} of {header.offset} of part {header.part} by worker {worker}")
        if header.step == 0:
            frames.clear()
        if header.step != len(frames):
            raise Malformed("seed", f"frame {header.step} of part {header.part} after {len(frames)}")
        frames.append(frame)
        if len(frames) < header.offset:
            return False
        # A repeated initial state must not undo updates.
        if all(self._clocks.done(other, header.part) < 0 for other in range(self._workers)):
            self._store.load(header.part, decode(frames))
        del self._initial_frames[header.part]
        return True

    # ── state ──

    @property
    def begun(self) -> bool:
        """Return whether the complete initial state has arrived."""
        return all(self._store.seeded(part) or self._store.group_of(part) < 0 for part in self._parts)

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
        """Return all applied updates as plain numbers and the store's own tensors; workers resend pushes in flight."""
        return {
            "masters": self._store.state(),
            "clocks": self._clocks.state(),
            "rules": self._hyperparameters.state(),
            "unchanged": dict(self._unchanged),
            "living": sorted(self._living),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state` returned, with nothing in flight."""
        self._store.restore(state["masters"])
        self._clocks.restore(state["clocks"])
        self._hyperparameters.restore(state["rules"])
        self._unchanged = dict(state["unchanged"])
        self._living &= set(state["living"])
        self._pending.clear()
        self._requests = {part: {} for part in self._parts}

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

    def _complete(self, here: ShardPart, worker: int, step: int, update: PendingUpdate) -> list[Delivery]:
        """Apply the complete ``update`` to the part ``here``, and return its parameters to waiting workers."""
        part, out = here.number, self._sum[: here.size]
        dtype = self._tasks[here.task].dtype
        members = [worker] if self._asynchronous else sorted(self._living)
        scale = 1.0 if self._asynchronous else self._workers / len(members)
        self._unchanged.pop(part, None)
        any_gradient, optimized = update.total(dtype, scale, out), self._store.group_of(part) >= 0
        groups = self._hyperparameters.of(members[0], step) if optimized else []
        if optimized and (groups is None or not self._store.seeded(part)):
            raise Malformed("seed", f"part {part} is pushed before its parameters and hyperparameters were sent")
        if any_gradient and groups:
            self._store.update(part, torch.frombuffer(out, dtype=getattr(torch, dtype)), groups)
        elif not self._asynchronous or self._store.group_of(part) < 0:
            self._unchanged[part] = step
        del self._pending[part, worker if self._asynchronous else 0]
        for member in members:
            self._clocks.tick(member, part)
        return self._answers(part)

    def _request(self, worker: int, part: int, step: int, wanted: Range) -> None:
        before, ranges = self._requests[part].get(worker, (step, []))
        self._requests[part][worker] = (step, _merged([*(ranges if before == step else []), wanted]))

    def _answers(self, part: int) -> list[Delivery]:
        """Return the requested ranges of ``part`` that workers may get now."""
        deliveries = []
        for worker, (step, ranges) in list(self._requests[part].items()):
            if self._clocks.may_go_on(worker, part, step):
                del self._requests[part][worker]
                deliveries += [Delivery(worker, self._value(part, step, *each)) for each in ranges]
        return deliveries

    def _value(self, part: int, step: int, start: int, end: int) -> Value:
        same = part in self._unchanged and (self._asynchronous or self._unchanged[part] == step)
        return Value(part, step, start, end, None if same else self._store.answer(part, start, end))

    def _stop_waiting_for(self, worker: int) -> list[Delivery]:
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
