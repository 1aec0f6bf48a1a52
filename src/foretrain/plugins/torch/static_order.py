"""Static replay: the same order of chunks in every step, agreed on once. For where ranks cannot talk beside the job.

It needs no messages, but it waits for the next chunk of the list even when another is ready everywhere: where one rank
is slower than another the link idles meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from foretrain.comm.coordinator.protocol import accumulated_differently
from foretrain.engine import Decision
from foretrain.errors import Disagreement, PeerLost, StallError
from foretrain.plugins.torch.collective_executor import CollectiveCommand, CollectiveExecutor
from foretrain.plugins.torch.streams import HostStreams, enqueues
from foretrain.plugins.torch.work_wait import LOOK, finish
from foretrain.schedule import Spec
from foretrain.tasks import Chunk, Task


class StaticOrder:
    """Issues ``chunks`` in their order, each when this rank is ready for it, once it has a carrier: see `start`.

    After the last chunk of a step the ranks agree on which tasks nobody used (one byte per task), and from time to
    time on the hash of their orders.

    Args:
        chunks: one step's, the same on every rank.
        tasks: indexed by task; their names are for messages.
        group: for the agreement; the carrier's own group, used between its orders.
        device: of the model, where ``group`` can reduce.
        streams: of the model's device; agreements go the way of collectives, never that of the model.
        landed: told each task and whether any rank used it.
        failed: told once what ended the job.
        check_every: steps between two hashes; 0 never.
        patience: seconds after which a step that does not move is taken for stuck.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        tasks: Sequence[Task],
        group: dist.ProcessGroup,
        device: torch.device,
        streams: HostStreams,
        landed: Callable[[int, bool], None],
        failed: Callable[[BaseException], None],
        check_every: int,
        patience: float,
    ) -> None:
        self._chunks, self._tasks = chunks, tasks
        self._carrier: CollectiveExecutor
        self._group, self._device, self._streams = group, device, streams
        self._give, self._failed, self._check_every, self._patience = landed, failed, check_every, patience
        self._changed = threading.Condition()
        # How often each task was ready and landed, and per step what was said of it: the training thread is ahead.
        self._seen = [0] * len(tasks)
        self._given = [0] * len(tasks)
        self._used: dict[int, list[bool]] = {}
        self._again: dict[int, bool] = {}
        self._arrived: list[int] = []
        self._steps = self._opened = 0
        self._moved = time.monotonic()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="foretrain-replayer", daemon=True)

    def start(self, carrier: CollectiveExecutor) -> None:
        """Begins; ``carrier`` issues the chunks, and its landings come to `landed`."""
        self._carrier = carrier
        self._thread.start()

    @property
    def spec(self) -> None:
        """Nothing is decided any more."""
        return None

    @property
    def log(self) -> tuple[Decision, ...]:
        """Nothing is decided any more."""
        return ()

    def retune(self, spec: Spec) -> None:
        """The order is fixed: `foretrain.plugins.torch.attached.Attached.set` refuses."""

    def open(self, step: int, again: bool) -> None:
        """A round is a walk through the list; the ranks compare ``again`` at its end."""
        self._again[step] = again
        self._moved = time.monotonic()
        self._opened += 1

    def ready(self, task: int, used: bool) -> None:
        """``task`` may be sent."""
        with self._changed:
            self._used.setdefault(self._seen[task], [True] * len(self._tasks))[task] = used
            self._seen[task] += 1
            self._changed.notify_all()

    def flush(self) -> None:
        """Nothing is held back here."""

    def landed(self, task: int, used: bool) -> None:
        """What the carrier calls: passed on at once where this rank knows that the task is used."""
        step = self._given[task]
        self._given[task] += 1
        self._moved = time.monotonic()
        if self._used[step][task]:
            self._give(task, True)
        else:
            with self._changed:
                self._arrived.append(task)
                self._changed.notify_all()

    def close(self, reason: str | None = None) -> None:
        """Ends the thread. The others notice when their collectives end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def _run(self) -> None:
        try:
            while self._step():
                self._steps += 1
        except BaseException as error:
            if not self._closing:
                self._failed(error)

    def _step(self) -> bool:
        for chunk in self._chunks:
            tasks = {piece.task for piece in chunk.pieces}
            self._wait_until(lambda tasks=tasks: self._all_ready(tasks))
            if self._closing:
                return False
            self._carrier.start(CollectiveCommand(self._carrier.sequence, chunk), lambda order: None)
        # Of the last step everything has landed, or not all of this one would have been ready.
        self._used.pop(self._steps - 1, None)
        used, again = self._used[self._steps], self._again.pop(self._steps)
        with self._streams.issuing(()):
            mask = torch.tensor([*used, again, not again], dtype=torch.uint8, device=self._device)
            self._wait(dist.all_reduce(mask, dist.ReduceOp.MAX, group=self._group, async_op=True))
            *somewhere, some_again, some_not = mask.tolist()
        if some_again and some_not:
            raise accumulated_differently(self._steps, f"this rank {'did' if again else 'did not'}")
        self._wait_until(lambda: len(self._arrived) == used.count(False))
        arrived, self._arrived = self._arrived, []
        if self._check_every and self._steps % self._check_every == 0:
            self._check()
        for task in arrived:
            self._give(task, bool(somewhere[task]))
        return not self._closing

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        """Returns when ``ready()``, or this rank closes."""
        with self._changed:
            while not self._changed.wait_for(lambda: self._closing or ready(), LOOK):
                self._look()

    def _look(self) -> None:
        """Raises for a step that does not move."""
        if self._opened > self._steps and time.monotonic() - self._moved > self._patience:
            waits = [
                f"step {self._steps}: task {task.name!r} is not ready on this rank"
                for task in self._tasks
                if self._seen[task.index] <= self._steps
            ]
            raise StallError(
                f"nothing has moved for {self._patience:g} s; {self._carrier.last()}",
                waits or [f"step {self._steps}: this rank is ready, another rank is not"],
            )

    def _wait(self, work: dist.Work | None) -> None:
        finish(work, self._go_on, enqueues=enqueues(self._group, self._device))

    def _go_on(self) -> None:
        if self._closing:
            raise PeerLost("this rank closes its attachment")
        self._look()

    def _all_ready(self, tasks: set[int]) -> bool:
        return all(self._seen[task] > self._steps for task in tasks)

    def _check(self) -> None:
        with self._streams.issuing(()):
            self._compare()

    def _compare(self) -> None:
        own = torch.tensor(list(self._carrier.digest), dtype=torch.uint8, device=self._device)
        all_of_them = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        self._wait(dist.all_gather(all_of_them, own, group=self._group, async_op=True))
        for rank, other in enumerate(all_of_them):
            if not torch.equal(own, other):
                raise Disagreement(f"rank {rank} has issued other collectives than this rank; {self._carrier.last()}")
