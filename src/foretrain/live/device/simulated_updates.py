"""Updates of a simulated rank: launched by step() at once, each behind the event that its gradients are back.

The real runtime has a thread that waits for them.

# Note [Order of updates]
Updates are queued on one stream in the order of first use, so that each waits for those before it. This delays nothing:
a forward pass uses parameters in that order. Their launches cost the host no time, as they are another thread's in the
real runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType

import torch
from torch import nn

from foretrain.plugins.torch import access_guards
from foretrain.plugins.torch.deferred_optimizer import Update, step_subset
from foretrain.units import Time

_SMALL = 64 << 10
"""Bytes below which a parameter is updated with the one before it: a norm or a bias."""


class Mark:
    """Event of the rank's log, forgotten when this object is deleted."""

    __slots__ = ("_forget", "number")

    def __init__(self, number: int, forget: Callable[[int], None]) -> None:
        self.number, self._forget = number, forget

    def __del__(self) -> None:
        self._forget(self.number)


class SimulatedUpdates:
    """Deferred updates on a stream of their own, each behind the sums it needs; see Note [Order of updates].

    Args:
        device: the loaded extension.
        parameters: indexed by task.
        views: the gradients, indexed by task.
        order: task indices by first use.
        launch: ps the host spends on launching a kernel.
    """

    def __init__(
        self,
        device: ModuleType,
        parameters: Sequence[nn.Parameter],
        views: Sequence[torch.Tensor],
        order: Sequence[int],
        launch: Time,
    ) -> None:
        self._device, self._parameters, self._views = device, parameters, views
        self._order, self._launch = order, launch
        self._task_of = {id(parameter): task for task, parameter in enumerate(parameters)}
        self._stream = torch.cuda.Stream()
        self._home = torch.cuda.current_stream()
        self._marks: list[Mark | None] = [None] * len(parameters)
        """Behind the last write to each task's sum or parameter."""
        self._used = [True] * len(parameters)
        self.by_id = {id(parameter): view for parameter, view in zip(parameters, views, strict=True)}

    def sent(self, task: int) -> None:
        """Do nothing: `promised` announces the sum."""

    def promised(self, task: int, event: int, used: bool) -> None:
        """Expect the sum of ``task`` when ``event`` happens; ``used`` if this rank has a part in it."""
        self._marks[task], self._used[task] = Mark(event, self._device.forget), used

    def was_used(self, task: int) -> bool:
        """Return whether there is a gradient for ``task``; ranks are taken to use the same parameters."""
        return self._used[task]

    def want(self, update: Update) -> None:
        """Launch ``update``, task by task, behind their sums and all that was launched before step()."""
        device = self._device
        asked = Mark(device.record(), device.forget)
        self._home = torch.cuda.current_stream()
        device.set_launch(0)
        try:
            with torch.cuda.stream(self._stream):
                device.wait(asked.number)
                for batch in self._batches([task for task in self._order if task in update.group_of]):
                    self._apply(update, batch)
        finally:
            device.set_launch(self._launch)

    def wait(self, key: int) -> None:
        """Make the current stream wait until it may use the parameter with id ``key``."""
        task = self._task_of[key]
        self._acquire((task,))
        if torch.cuda.current_stream() == self._home:
            access_guards.pending_updates.pop(key, None)

    def wait_free(self, task: int) -> None:
        """Make the current stream wait until it may write the buffer of ``task``."""
        self._acquire((task,))

    def wait_all(self) -> None:
        """Make the current stream wait until it may use all sums and parameters."""
        self._acquire(range(len(self._marks)))
        self.unblock()

    def wait_wanted(self) -> None:
        """Wait as `wait_all` if any parameter has a pending update."""
        if any(id(parameter) in access_guards.pending_updates for parameter in self._parameters):
            self.wait_all()

    def pending(self) -> list[str]:
        """Return no pending updates: none waits on the host."""
        return []

    def unblock(self) -> None:
        """Let the script use all parameters without waiting."""
        for parameter in self._parameters:
            access_guards.pending_updates.pop(id(parameter), None)

    def _acquire(self, tasks: Iterable[int]) -> None:
        for mark in dict.fromkeys(self._marks[task] for task in tasks):
            if mark is not None:
                self._device.wait(mark.number)

    def _batches(self, tasks: Sequence[int]) -> Iterator[list[int]]:
        batch: list[int] = []
        for task in tasks:
            if batch and self._views[task].nbytes >= _SMALL:
                yield batch
                batch = []
            batch.append(task)
        if batch:
            yield batch

    def _apply(self, update: Update, batch: list[int]) -> None:
        self._acquire(batch)
        used = [task for task in batch if self._used[task]]
        if used:
            # `SimulatedAttached.defer` calls the hooks, once for the whole step.
            step_subset(update, [(task, self._parameters[task]) for task in used], hooked=False)
        mark = Mark(self._device.record(), self._device.forget)
        for task in batch:
            self._marks[task] = mark
            access_guards.pending_updates[id(self._parameters[task])] = self.wait
