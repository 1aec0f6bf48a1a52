"""Static replay: the same order of chunks in every step, agreed on once, for ranks that cannot reach a coordinator.

It needs no messages, but it waits for the next chunk of the list even when another is ready everywhere: if one rank is
slower than another the link idles meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from foretrain.comm.coordinator.protocol import CollectiveCommand, accumulated_differently
from foretrain.comm.event_loop import POLL_INTERVAL
from foretrain.engine import Decision
from foretrain.errors import Disagreement, PeerLost, StallError
from foretrain.plugins.torch.process_group_executor import ProcessGroupExecutor
from foretrain.plugins.torch.streams import HostStreams, enqueues, finish
from foretrain.schedule import Spec
from foretrain.tasks import Chunk, Task


class StaticOrder:
    """Exchange that issues ``chunks`` in their order, each when this rank is ready for it; begins with `start`.

    After the last chunk of a step the ranks agree on which tasks no rank used (one byte per task), and from time to
    time they compare hashes of their commands.

    Args:
        chunks: one step's, the same on every rank.
        tasks: indexed by task.
        group: for these agreements; the executor's own group, used between its commands.
        device: on which ``group`` can reduce.
        streams: of the model's device; agreements use its issue stream.
        landed: called with each task and whether any rank had a gradient.
        failed: called once with the error that ends the job.
        check_every: steps between two comparisons; 0 never compares.
        stall_timeout: seconds without progress after which a step counts as stuck.
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
        stall_timeout: float,
    ) -> None:
        self._chunks, self._tasks = chunks, tasks
        self._executor: ProcessGroupExecutor
        self._group, self._device, self._streams = group, device, streams
        self._report, self._failed, self._check_every, self._stall_timeout = landed, failed, check_every, stall_timeout
        self._changed = threading.Condition()
        # The training thread may be rounds ahead: count ready and landed tasks, and keep flags by round.
        self._ready_count = [0] * len(tasks)
        self._landed_count = [0] * len(tasks)
        self._used: dict[int, list[bool]] = {}
        self._accumulates: dict[int, bool] = {}
        self._undecided: list[int] = []
        """Landed tasks without a gradient on this rank."""
        self._steps = self._opened = 0
        self._last_progress = time.monotonic()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="foretrain-replayer", daemon=True)

    def start(self, executor: ProcessGroupExecutor) -> None:
        """Begin to issue chunks through ``executor``, which calls `landed`."""
        self._executor = executor
        self._thread.start()

    @property
    def spec(self) -> None:
        """Return None: the order is fixed."""
        return None

    @property
    def log(self) -> tuple[Decision, ...]:
        """Return no decisions: the order is fixed."""
        return ()

    def retune(self, spec: Spec) -> None:
        """Do nothing: the order is fixed, and `foretrain.plugins.torch.attached.Attached.set` refuses."""

    def open(self, step: int, again: bool) -> None:
        """Begin a round; at its end the ranks compare whether it adds to the sums of the last (``again``)."""
        self._accumulates[step] = again
        self._last_progress = time.monotonic()
        self._opened += 1

    def ready(self, task: int, used: bool) -> None:
        """Allow ``task`` to be sent."""
        with self._changed:
            self._used.setdefault(self._ready_count[task], [True] * len(self._tasks))[task] = used
            self._ready_count[task] += 1
            self._changed.notify_all()

    def flush(self) -> None:
        """Do nothing: no task is held back."""

    def landed(self, task: int, used: bool) -> None:
        """Report a landed task, at the end of the round if this rank has no gradient for it. Called by the executor."""
        step = self._landed_count[task]
        self._landed_count[task] += 1
        self._last_progress = time.monotonic()
        if self._used[step][task]:
            self._report(task, True)
        else:
            with self._changed:
                self._undecided.append(task)
                self._changed.notify_all()

    def close(self, reason: str | None = None) -> None:
        """Stop the thread. Other ranks notice when their collectives fail."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(3 * POLL_INTERVAL)

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
            self._wait_until(lambda tasks=tasks: all(self._ready_count[task] > self._steps for task in tasks))
            if self._closing:
                return False
            self._executor.start(CollectiveCommand(self._executor.sequence, chunk), lambda order: None)
        # All tasks of the last step have landed, since all of this one were ready.
        self._used.pop(self._steps - 1, None)
        used, again = self._used[self._steps], self._accumulates.pop(self._steps)
        with self._streams.issuing(()):
            mask = torch.tensor([*used, again, not again], dtype=torch.uint8, device=self._device)
            self._wait(dist.all_reduce(mask, dist.ReduceOp.MAX, group=self._group, async_op=True))
            *somewhere, some_again, some_not = mask.tolist()
        if some_again and some_not:
            raise accumulated_differently(self._steps, f"this rank {'did' if again else 'did not'}")
        self._wait_until(lambda: len(self._undecided) == used.count(False))
        arrived, self._undecided = self._undecided, []
        if self._check_every and self._steps % self._check_every == 0:
            self._compare()
        for task in arrived:
            self._report(task, bool(somewhere[task]))
        return not self._closing

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait until ``ready()``, or until this rank closes."""
        with self._changed:
            while not self._changed.wait_for(lambda: self._closing or ready(), POLL_INTERVAL):
                self._check_stall()

    def _check_stall(self) -> None:
        """Raise StallError if the step makes no progress."""
        if self._opened > self._steps and time.monotonic() - self._last_progress > self._stall_timeout:
            waits = [
                f"step {self._steps}: task {task.name!r} is not ready on this rank"
                for task in self._tasks
                if self._ready_count[task.index] <= self._steps
            ]
            raise StallError(
                f"nothing has moved for {self._stall_timeout:g} s; {self._executor.last()}",
                waits or [f"step {self._steps}: this rank is ready, another rank is not"],
            )

    def _wait(self, work: dist.Work | None) -> None:
        finish(work, self._check_open, enqueues=enqueues(self._group, self._device))

    def _check_open(self) -> None:
        if self._closing:
            raise PeerLost("this rank closes its attachment")
        self._check_stall()

    def _compare(self) -> None:
        """Raise Disagreement if another rank has issued other collectives."""
        with self._streams.issuing(()):
            own = torch.tensor(list(self._executor.digest), dtype=torch.uint8, device=self._device)
            digests = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
            self._wait(dist.all_gather(digests, own, group=self._group, async_op=True))
            for rank, other in enumerate(digests):
                if not torch.equal(own, other):
                    text = f"rank {rank} has issued other collectives than this rank; {self._executor.last()}"
                    raise Disagreement(text)
