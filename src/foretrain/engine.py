"""Engine that runs one pure policy in one world and keeps the log of its decisions.

A policy has no clock, thread, tensor or socket; a world decides nothing. The engine checks by counting that no task
sends more bytes than it has, none before its gradient exists, and gathers none before it is reduced. A task has
*landed* when all its bytes have arrived. `foretrain.schedule.script.validate` checks which bytes a schedule sends.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from functools import partial
from typing import Protocol

import msgspec

from foretrain.errors import ScheduleError
from foretrain.tasks import Action, Chunk, Done, Event, Ready, Start, StepBegin, Task, Wake, WakeAt
from foretrain.units import Time


class Policy(Protocol):
    """Pure state machine: the same events at the same times give the same actions."""

    def handle(self, event: Event, now: Time) -> Sequence[Action]:
        """Return the actions in response to ``event``, in order. ``now`` never decreases."""
        ...


class World(Protocol):
    """Clock, timer and network of a policy. Callbacks never run inside these calls."""

    def now(self) -> Time:
        """Return the present time."""
        ...

    def call_at(self, when: Time, call: Callable[[], None]) -> None:
        """Run ``call`` at ``when``, or as soon as possible after it."""
        ...

    def start(self, chunk: Chunk, done: Callable[[Chunk], None]) -> None:
        """Send ``chunk`` behind all that were started before; call ``done(chunk)`` when it has arrived."""
        ...


class Decision(msgspec.Struct, frozen=True, gc=False):
    """Entry of the log: at ``time`` in step ``step`` the policy started ``chunk``."""

    time: Time
    step: int
    chunk: Chunk


class Engine:
    """Engine of ``policy`` in ``world``. `post` and the world's callbacks must come from one thread.

    Args:
        policy: decides.
        world: carries the decisions out.
        tasks: what there is to send in every step, indexed by `Task.index`.
        landed: called with a task's index when all its bytes have arrived everywhere, once per step.
        log: where to keep decisions; a job that runs for weeks hands in a deque that forgets.
    """

    def __init__(
        self,
        policy: Policy,
        world: World,
        tasks: Sequence[Task],
        landed: Callable[[int], None] | None = None,
        log: MutableSequence[Decision] | None = None,
    ) -> None:
        self._policy = policy
        self._world = world
        self._tasks = tasks
        self._landed = landed
        self._step = -1
        self._log: MutableSequence[Decision] = [] if log is None else log
        # Bytes of each task in this step that may still be reduced, may be gathered, and have yet to land.
        self._to_reduce = [0] * len(tasks)
        self._to_gather = [0] * len(tasks)
        self._to_land = [0] * len(tasks)

    @property
    def log(self) -> tuple[Decision, ...]:
        """Return all decisions so far, in order."""
        return tuple(self._log)

    def post(self, event: Event) -> None:
        """Give ``event`` to the policy and carry out its actions."""
        if type(event) is Ready:
            self._release(event.task)
        elif type(event) is StepBegin:
            self._step = event.step
        self._act(event)

    def waiting(self) -> tuple[str, ...]:
        """Return one line per task that is ready and has not completed."""
        return tuple(
            f"task {task.name!r}: {self._to_land[i]} of {task.size} bytes have not landed"
            f" ({self._to_reduce[i]} never started, {self._to_gather[i]} reduced but not gathered)"
            for i, task in enumerate(self._tasks)
            if self._to_land[i]
        )

    def _act(self, event: Event) -> None:
        now = self._world.now()
        for action in self._policy.handle(event, now):
            if type(action) is Start:
                chunk = action.chunk
                self._take(chunk)
                self._log.append(Decision(now, self._step, chunk))
                self._world.start(chunk, self._finish)
            elif type(action) is WakeAt:
                self._world.call_at(action.time, partial(self._act, Wake()))

    def _release(self, task: int) -> None:
        if self._to_land[task]:
            raise ScheduleError(f"task {self._tasks[task].name!r} is ready again before its last step landed")
        self._to_reduce[task] = self._to_land[task] = self._tasks[task].size

    def _take(self, chunk: Chunk) -> None:
        left = self._to_gather if chunk.op == "all_gather" else self._to_reduce
        for piece in chunk.pieces:
            if piece.size <= 0 or not 0 <= piece.task < len(left):
                raise ScheduleError(f"{piece} is no part of a task: tasks are 0 to {len(left) - 1}, sizes positive")
            left[piece.task] -= piece.size
            if left[piece.task] < 0:
                raise ScheduleError(
                    f"task {self._tasks[piece.task].name!r}: the policy started {-left[piece.task]} bytes too many "
                    f"({chunk.op} of [{piece.offset}, {piece.offset + piece.size})): they are not ready or were sent"
                )

    def _finish(self, chunk: Chunk) -> None:
        landed: list[int] = []
        if chunk.op == "reduce_scatter":
            for piece in chunk.pieces:
                self._to_gather[piece.task] += piece.size
        else:
            to_land = self._to_land
            for piece in chunk.pieces:
                to_land[piece.task] -= piece.size
                if not to_land[piece.task]:
                    landed.append(piece.task)
        self._act(Done(chunk))
        if self._landed:
            for task in landed:
                self._landed(task)
