"""Deferred updates: the optimizer's own step, on the parameters whose sums have landed.

`step()` only records the optimizer, its hyperparameters (a scheduler may change them before the update) and its tasks.
A thread applies the updates as sums land, the most urgent first, a few megabytes at a time; small ones gather while
nobody waits. A forward pass waits for each parameter alone. The optimizer's step with ``param_groups`` of a
few parameters gives the same bits as the whole step if parameters do not influence each other; for other optimizers see
`why_not_separable`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch import optim
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from foretrain.comm.ps.placement import ELEMENTWISE
from foretrain.comm.run_trace import Applied
from foretrain.errors import ForetrainError
from foretrain.plugins.torch import access_guards
from foretrain.plugins.torch.streams import HostStreams
from foretrain.tasks import Task

_SEPARABLE: tuple[type[optim.Optimizer], ...] = tuple(getattr(optim, name) for name in ELEMENTWISE)
_BATCH = 8 << 20
"""Bytes to update at once: enough to hide the cost of a call (0.1 ms), few enough that urgent updates do not wait."""
_LEAST = 1 << 20
"""Bytes to begin with while more are to land and nobody waits: updating them takes about as long as the call."""


def why_not_separable(optimizer: optim.Optimizer) -> str | None:
    """Return why updates of ``optimizer`` cannot be applied parameter by parameter; None if they can."""
    kind = type(optimizer).__name__
    if type(optimizer) not in _SEPARABLE:
        return f"{kind} is not known to update each parameter by itself"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"this {kind} has step hooks that expect one whole step"
    if any(map(_expects_whole, (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()))):
        return f"this {kind}, as every optimizer, has step hooks that expect one whole step"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"this {kind} is differentiable"
    return None


def _expects_whole(hook: Callable[..., Any]) -> bool:
    """Return whether a hook must see whole steps: all must but those whose owner says otherwise."""
    return getattr(getattr(hook, "__self__", None), "expects_whole_steps", True)


class Update(NamedTuple):
    """Call of step(): optimizer, hyperparameters by group, group by task, number, and the device's event if any."""

    optimizer: optim.Optimizer
    groups: tuple[dict[str, Any], ...]
    group_of: dict[int, int]
    step: int
    mark: torch.cuda.Event | None


class DeferredOptimizer:
    """Thread that applies updates.

    Args:
        parameters: indexed by task.
        views: the gradients, indexed by task.
        tasks: for urgency and size.
        streams: of the model's device.
        failed: called with the error of an optimizer.
        check: raises the error that has ended the job, if any.
        keep: whether to keep an `Applied` of every batch.
        apply: updates these parameters; `step_subset` runs their optimizer.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        views: Sequence[torch.Tensor],
        tasks: Sequence[Task],
        streams: HostStreams,
        failed: Callable[[BaseException], None],
        check: Callable[[], None],
        keep: bool = False,
        apply: Callable[[Update, Sequence[tuple[int, torch.nn.Parameter]]], None] | None = None,
    ) -> None:
        self._apply_here = apply or step_subset
        self._parameters, self._views, self._tasks = parameters, views, tasks
        self._streams, self._failed, self._check = streams, failed, check
        self._task_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._by_use = [task.index for task in sorted(tasks, key=lambda task: task.first_use)]
        lock = threading.RLock()
        self._changed, self._worth = threading.Condition(lock), threading.Condition(lock)
        """For threads that wait for a sum or an update, and for the one that applies updates."""
        self._waiting = 0
        """Threads that wait."""
        self._awaited: list[int] = []
        """Tasks that they wait for, where it is not all."""
        self._landed = [True] * len(tasks)
        self._used = [True] * len(tasks)
        self._in_flight = 0
        self._wanted: dict[int, Update] = {}
        self._to_land = 0
        """Of the wanted ones."""
        self._due: list[int] = []
        self._due_bytes = 0
        self._stop = False
        self.applied: list[Applied] = []
        self._keep = keep
        self._thread = threading.Thread(target=self._run, name="foretrain-updates", daemon=True)
        self._thread.start()

    # ── calls of the executor ──

    def landed(self, task: int, used: bool) -> None:
        """Record that the sum of ``task`` has landed; ``used`` says whether any rank had a gradient."""
        with self._changed:
            self._landed[task], self._used[task] = True, used
            self._in_flight -= 1
            if task in self._wanted:
                self._to_land -= 1
                self._make_due(task)
            if task in self._awaited or not self._in_flight:
                self._changed.notify_all()

    def wake(self) -> None:
        """Wake all waiting threads, which then raise the failure of the job."""
        with self._changed:
            self._changed.notify_all()

    # ── calls of the training thread ──

    def sent(self, task: int) -> None:
        """Expect the sum of ``task``."""
        with self._changed:
            self._landed[task] = False
            self._in_flight += 1

    def want(self, update: Update) -> None:
        """Apply ``update`` to each of its tasks when its sum has landed."""
        with self._changed:
            for task in update.group_of:
                access_guards.pending_updates[id(self._parameters[task])] = self.wait
                self._wanted[task] = update
            self._to_land = sum(not self._landed[task] for task in self._wanted)
            for task in update.group_of:
                if self._landed[task]:
                    self._make_due(task)

    def was_used(self, task: int) -> bool:
        """Return whether any rank had a gradient for ``task``, once it has landed."""
        return self._used[task]

    def wait(self, key: int) -> None:
        """Wait until the parameter with id ``key`` is updated."""
        task = self._task_of[key]
        if threading.current_thread() is not self._thread:
            self._wait(lambda: task not in self._wanted, task)
        self._streams.acquire((task,))
        if self._streams.enqueues:
            self._release((task,))

    def wait_free(self, task: int) -> None:
        """Wait until the buffer of ``task`` may be written: its sum has landed and its update is applied."""
        if not self._landed[task] or task in self._wanted:
            self._wait(lambda: self._landed[task] and task not in self._wanted, task)
        self._streams.acquire((task,))

    def wait_all(self) -> None:
        """Wait until all sums have landed and all wanted updates are applied."""
        self._wait(lambda: not self._in_flight)
        self.wait_wanted()

    def wait_wanted(self) -> None:
        """Wait until all wanted updates are applied; gradients without a step() stay in flight.

        Other ranks may send those only in their step(), before which they may wait for this rank.
        """
        self._wait(lambda: not self._wanted)
        self._streams.acquire_all()
        if self._streams.enqueues and access_guards.pending_updates:
            self._release(range(len(self._tasks)))

    def pending(self) -> list[str]:
        """Return the names of tasks that have not landed, the most urgent first."""
        return [self._tasks[task].name for task in self._by_use if not self._landed[task]]

    def close(self) -> None:
        """Stop the thread; pending updates are not applied, and block no reader."""
        with self._changed:
            self._stop = True
            self._worth.notify()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        # The caller's stream may reuse the buffers' memory, but only after work that is enqueued.
        self._streams.acquire_all()
        for parameter in self._parameters:
            access_guards.pending_updates.pop(id(parameter), None)

    def _release(self, tasks: Iterable[int]) -> None:
        """Let readers of ``tasks`` go on without waiting, now that the stream of step() waits for the updates."""
        if threading.current_thread() is self._thread or not self._streams.on_step_stream():
            return
        with self._changed:
            for task in tasks:
                if task not in self._wanted:
                    access_guards.pending_updates.pop(id(self._parameters[task]), None)

    def _make_due(self, task: int) -> None:
        heappush(self._due, self._tasks[task].first_use)
        self._due_bytes += self._tasks[task].size
        if self._worthwhile():
            self._worth.notify()

    def _worthwhile(self) -> bool:
        """Return whether to apply what is due, and not to wait for more."""
        return bool(self._due) and (self._due_bytes >= _LEAST or not self._to_land or self._waiting > 0)

    def _wait(self, ready: Callable[[], bool], *tasks: int) -> None:
        """Wait until ``ready``, which one of ``tasks`` decides, or all if there are none."""
        if ready():
            return
        with self._changed:
            self._waiting += 1
            self._awaited += tasks
            try:
                if self._worthwhile():
                    self._worth.notify()
                while not ready():
                    self._check()
                    # With a timeout, so that Ctrl-C takes effect.
                    self._changed.wait(1.0)
            finally:
                self._waiting -= 1
                for task in tasks:
                    self._awaited.remove(task)

    # ── the thread ──

    def _run(self) -> None:
        views = access_guards.updating[threading.get_ident()] = {}
        try:
            while (batch := self._next()) is not None:
                self._apply(batch, views)
        except ForetrainError as error:
            self._failed(error)
        except BaseException as error:
            failure = ForetrainError(f"the optimizer failed in a deferred update: {error!r}")
            failure.__cause__ = error
            self._failed(failure)
        finally:
            del access_guards.updating[threading.get_ident()]

    def _next(self) -> list[int] | None:
        """Return the most urgent tasks that one call of one optimizer can update; None at the end."""
        with self._worth:
            while not self._worthwhile() and not self._stop:
                self._worth.wait()
            if self._stop:
                return None
            batch: list[int] = []
            size = 0
            while self._due and size < _BATCH:
                task = self._by_use[self._due[0]]
                if batch and self._wanted[task] is not self._wanted[batch[0]]:
                    break
                heappop(self._due)
                batch.append(task)
                size += self._tasks[task].size
            self._due_bytes -= size
            return batch

    def _apply(self, batch: list[int], views: dict[int, torch.Tensor]) -> None:
        update = self._wanted[batch[0]]
        used = [task for task in batch if self._used[task]]
        began = perf_counter_ns()
        if used:
            for task in used:
                views[id(self._parameters[task])] = self._views[task]
            with self._streams.updating(used, update.mark):
                self._apply_here(update, [(task, self._parameters[task]) for task in used])
                self._streams.updated(used)
            views.clear()
        if self._keep:
            self.applied.append(Applied(tuple(batch), update.step, began, perf_counter_ns()))
        with self._changed:
            for task in batch:
                del self._wanted[task]
                if not self._streams.enqueues:
                    access_guards.pending_updates.pop(id(self._parameters[task]), None)
            self._changed.notify_all()


def step_subset(update: Update, members: Sequence[tuple[int, torch.nn.Parameter]], *, hooked: bool = True) -> None:
    """Run one step of the optimizer on ``members`` alone; ``hooked`` with the global optimizer hooks around it.

    It runs on a copy that shares the optimizer's state: a scheduler on the training thread may write into the
    optimizer's own ``param_groups`` meanwhile.
    """
    twin = object.__new__(type(update.optimizer))
    twin.__dict__.update(update.optimizer.__dict__)
    by_group: dict[int, list[torch.nn.Parameter]] = {}
    for task, parameter in members:
        by_group.setdefault(update.group_of[task], []).append(parameter)
    twin.param_groups = [{**update.groups[place], "params": these} for place, these in sorted(by_group.items())]
    step: Any = type(update.optimizer).step
    (step if hooked else getattr(step, "__wrapped__", step))(twin)
