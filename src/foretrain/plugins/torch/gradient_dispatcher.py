"""Dispatcher of gradients: hands them to the exchange during the backward pass, and brings sums back on access.

    hook: gradient i complete ──▶ flat buffer, × 1/N ──▶ READY     .grad is empty; `access_guards.held` has its owner
    end of the pass: the remaining tasks are unused on this rank
    step(): updates are wanted, and are applied as sums land
    .grad read before step(): all sums are fetched; step() is then the optimizer's own, at once

A *round* is one exchange of every task, once. A training step is one round, unless gradients are accumulated again
after they were sent; then it is two, and the second adds to the sums of the first, as DistributedDataParallel does
when backward() is called twice without no_sync.

# Note [Rounds and passes]
Rounds must not depend on what one rank alone sees, such as which branches it takes. All ranks run the same number of
backward passes per step, so these decide. A step is expected to have as many as the last one; all but the last of them
only accumulate; in the last each gradient is sent as soon as it is complete, and at its end the rest. Then every
further pass is one more round. A step with fewer passes sends at step(), and the next one expects as few.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

import torch
from torch import nn, optim

from foretrain.comm.coordinator.protocol import CoordinatedExchange
from foretrain.plugins.torch import access_guards
from foretrain.plugins.torch.deferred_optimizer import Update
from foretrain.plugins.torch.gradient_buffer import GradientBuffer, refuse_sparse
from foretrain.plugins.torch.streams import HostStreams


class UpdateSink(Protocol):
    """Part that applies updates when sums have landed: `DeferredOptimizer`, or a simulated rank's own."""

    def sent(self, task: int) -> None:
        """Expect the sum of ``task``."""
        ...

    def want(self, update: Update) -> None:
        """Apply ``update`` to each of its tasks when its sum has landed."""
        ...

    def was_used(self, task: int) -> bool:
        """Return whether any rank had a gradient for ``task``, whose sum has landed."""
        ...

    def wait_free(self, task: int) -> None:
        """Wait until the buffer of ``task`` may be written."""
        ...

    def wait_all(self) -> None:
        """Wait until all sums have landed and all wanted updates are applied."""
        ...

    def wait_wanted(self) -> None:
        """Wait until all wanted updates are applied."""
        ...


class GradientLocation(IntEnum):
    """Place of a parameter's gradient."""

    GRAD = 0
    """In ``.grad``."""
    SUM = 1
    """The sum that is, or will be, in the flat buffer."""
    ABSENT = 2
    """This rank sent zeros: the sum in the flat buffer if another rank had a gradient, else ``.grad``."""


class GradientDispatcher:
    """Dispatcher of gradients, and their `access_guards.GradientOwner` after they were sent.

    One thread at a time calls it: the training thread, or the autograd engine's on its behalf.

    Args:
        parameters: indexed by task.
        gradients: their flat buffers.
        fires: per task, how often its gradient accumulates in one backward pass before it is complete.
        passes: backward passes per step, to begin with; see Note [Rounds and passes].
        exchange: sends tasks that are ready.
        updates: applies deferred updates.
        streams: of the model's device.
        ranks: by how much gradients are divided: N, or 1 where each worker's are an update of their own.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: GradientBuffer,
        fires: Sequence[int],
        passes: int,
        exchange: CoordinatedExchange,
        updates: UpdateSink,
        streams: HostStreams,
        ranks: int,
    ) -> None:
        self._parameters, self._views = parameters, gradients.views
        self._expected, self._passes = list(fires), passes
        self._exchange, self._updates, self._streams = exchange, updates, streams
        self._share = 1.0 / ranks
        self._task_of = {id(parameter): task for task, parameter in enumerate(parameters)}
        self._everything: dict[int, access_guards.GradientOwner] = {id(parameter): self for parameter in parameters}
        count = len(parameters)
        self.rounds = 0
        self._open = self._sends = False
        self._fresh = False
        """True if a round has begun since the last fetch or step."""
        self._accumulates = False
        """True if a round has begun since the last step, so that the next one adds to its sums."""
        self._pass = -1
        self._passed = 0
        """Passes since the last fetch or step."""
        self._fired = [0] * count
        self._sent = [False] * count
        self._location = [GradientLocation.GRAD] * count
        self._local: set[int] = set()
        """Tasks accumulated here, and not sent, since they were last cleared."""
        self._dropped: set[int] = set()
        """Tasks cleared since the round began, after they were sent."""
        self._zeros: set[int] = set()
        """Tasks cleared to zeros that are not yet in ``.grad``."""
        self._stepped: set[int] = set()
        """Indices of the optimizers that have stepped in this round."""

    # ── backward ──

    def gradient(self, task: int, synchronizes: bool) -> None:
        """Take a gradient that was accumulated into ``.grad``; it is sent later unless ``synchronizes``."""
        if not synchronizes:
            self._finish()
            self._local.add(task)
            self._recall(task)
            return
        if not self._open or self._pass != access_guards.passes:
            self._begin_pass()
        elif self._sent[task]:
            # It accumulates more often in one pass than before.
            self._expected[task] = self._fired[task] + 1
            self._finish()
            self._begin()
        self._fired[task] += 1
        if self._sends and self._fired[task] >= self._expected[task]:
            self._send(task)

    def _begin_pass(self) -> None:
        if self._open and self._sends:
            # The last pass failed before its end.
            self._finish()
        elif self._open:
            self._local.update(task for task, times in enumerate(self._fired) if times)
        self._pass = access_guards.passes
        self._passed += 1
        self._fired = [0] * len(self._fired)
        if not self._open:
            self._begin()
        self._sends = self._passed >= self._passes
        if self._sends:
            access_guards.pass_ends.append(self._finish)

    def _begin(self) -> None:
        self._open = self._fresh = True
        self._stepped.clear()
        self._dropped.clear()
        access_guards.held.update(self._everything)
        self._exchange.open(self.rounds, self._accumulates)
        self._accumulates = True
        self.rounds += 1

    def _send(self, task: int) -> None:
        """Hand the gradient of ``task`` to the exchange."""
        with torch.no_grad():
            self._contribute(task)
        access_guards.set_raw_grad(self._parameters[task], None)
        self._hand_over(task, GradientLocation.SUM)

    def _hand_over(self, task: int, location: GradientLocation) -> None:
        self._sent[task] = True
        self._location[task] = location
        self._zeros.discard(task)
        self._local.discard(task)
        self._dropped.discard(task)
        self._updates.sent(task)
        self._streams.ready(task)
        self._exchange.ready(task, location is GradientLocation.SUM)

    def _contribute(self, task: int) -> None:
        """Write ``.grad`` / N into the buffer; DistributedDataParallel divides before it sums, too."""
        view, gradient = self._views[task], access_guards.raw_grad(self._parameters[task])
        assert gradient is not None
        refuse_sparse(gradient)
        self._updates.wait_free(task)
        if self._is_sum(task):
            # The last sum was not cleared: add the new gradient to it, as autograd would in .grad.
            view.add_(gradient)
            view.mul_(self._share)
        else:
            torch.mul(gradient, self._share, out=view)

    def _is_sum(self, task: int) -> bool:
        """Return whether a landed task's buffer is its parameter's gradient."""
        held = self._location[task]
        return held is GradientLocation.SUM or (held is GradientLocation.ABSENT and self._updates.was_used(task))

    def _recall(self, task: int) -> None:
        """Bring the last sum back to ``.grad``, before more is added under no_sync."""
        if self._location[task] is not GradientLocation.GRAD:
            self._updates.wait_free(task)
            fresh = access_guards.raw_grad(self._parameters[task])
            if self._is_sum(task) and fresh is not None:
                with torch.no_grad():
                    self._views[task].add_(fresh)
            self._return(task)

    # ── between backward and step ──

    def fetch(self) -> None:
        """Fetch all sums into ``.grad``, and apply every wanted update."""
        self.finish()
        self._fresh = False
        self._updates.wait_all()
        for task, location in enumerate(self._location):
            if location is not GradientLocation.GRAD:
                self._return(task)
        for task in tuple(self._zeros):
            self._put_zeros(task)

    def _return(self, task: int) -> None:
        if self._is_sum(task):
            access_guards.set_raw_grad(self._parameters[task], self._views[task])
        access_guards.held.pop(id(self._parameters[task]), None)
        self._location[task] = GradientLocation.GRAD

    def drop(self, key: int, zeros: bool) -> None:
        """Clear one gradient, to zeros or None; a sum in flight is ignored when it arrives."""
        task = self._task_of[key]
        zeros = zeros and self._has_gradient(task)
        if self._sent[task] or self._location[task] is not GradientLocation.GRAD:
            self._dropped.add(task)
        self._location[task] = GradientLocation.GRAD
        self._local.discard(task)
        access_guards.set_raw_grad(self._parameters[task], None)
        if zeros:
            self._zeros.add(task)
        elif not self._open:
            access_guards.held.pop(key, None)

    def _has_gradient(self, task: int) -> bool:
        """Return whether reading ``.grad`` would return a tensor."""
        if self._location[task] is GradientLocation.ABSENT:
            self._updates.wait_free(task)
        return (
            task in self._zeros
            or self._location[task] is GradientLocation.SUM
            or access_guards.raw_grad(self._parameters[task]) is not None
            or self._is_sum(task)
        )

    def _put_zeros(self, task: int) -> None:
        self._zeros.discard(task)
        access_guards.held.pop(id(self._parameters[task]), None)
        access_guards.set_raw_grad(self._parameters[task], torch.zeros_like(self._parameters[task]))

    @property
    def all_stepped(self) -> bool:
        """Return whether step() was called for all gradients that were applied; here none is without it."""
        return True

    def check_stepped(self) -> None:
        """Raise ConfigError if optimizers' states are not those after their last step(); here they always are."""

    def finish(self) -> None:
        """Complete the round: no further backward pass belongs to it."""
        self._finish()
        if self._passed:
            self._passes, self._passed = self._passed, 0

    @property
    def partly_sent(self) -> bool:
        """Return whether a round is open in which this rank has not yet sent all tasks."""
        return self._open and not all(self._sent)

    def _finish(self) -> None:
        """End the round: send remaining gradients, or zeros."""
        if not self._open:
            return
        for task, sent in enumerate(self._sent):
            if not sent:
                self._complete(task)
        self._exchange.flush()
        self._open = False
        self._sent = [False] * len(self._sent)

    def _complete(self, task: int) -> None:
        gradient = access_guards.raw_grad(self._parameters[task])
        if gradient is not None and (self._fired[task] or task in self._local):
            self._send(task)
            return
        self._updates.wait_free(task)
        view = self._views[task]
        if self._is_sum(task):
            gradient = view
        if task in self._zeros:
            self._put_zeros(task)
        with torch.no_grad():
            if gradient is None:
                view.zero_()
            else:
                # Not cleared and unused in this round: the old sum stays, unless another rank sends a new gradient.
                # That must be added to the old sum, of which this rank sends its part.
                refuse_sparse(gradient)
                if gradient.data_ptr() == view.data_ptr():
                    access_guards.set_raw_grad(self._parameters[task], view.clone())
                torch.mul(gradient, self._share, out=view)
        self._hand_over(task, GradientLocation.ABSENT)

    # ── step ──

    def step(self, place: int, optimizer: optim.Optimizer, tasks: dict[int, int]) -> bool:
        """Defer the step of ``optimizer``; return False if the caller must do it now.

        Args:
            place: index among the attached optimizers.
            optimizer: whose hyperparameters apply as they are now.
            tasks: its tasks, each with the index of its parameter group.
        """
        fresh = self._fresh or (bool(self._stepped) and place not in self._stepped)
        self.finish()
        self._fresh = False
        if not fresh or self._other_gradients(tasks):
            return self._step_now()
        self._stepped.add(place)
        self.stepped()
        # Copies: a scheduler may change settings before the update is applied.
        groups = tuple(
            {
                name: value.clone() if isinstance(value, torch.Tensor) else value
                for name, value in group.items()
                if name != "params"
            }
            for group in optimizer.param_groups
        )
        mark = self._streams.step_mark(v for group in groups for v in group.values() if isinstance(v, torch.Tensor))
        self._updates.want(Update(optimizer, groups, tasks, self.rounds - 1, mark))
        return True

    def _step_now(self) -> bool:
        """Fetch sums for a step that must not be deferred; return False."""
        self.fetch()
        return False

    def stepped(self) -> None:
        """Record an optimizer's step, done or wanted: the next round does not add to this one's sums."""
        self._accumulates = False

    def _other_gradients(self, tasks: dict[int, int]) -> bool:
        """Return whether gradients of ``tasks`` are not in the buffers: cleared, local, or assigned by the script."""
        return not self._dropped.isdisjoint(tasks) or any(
            access_guards.raw_grad(self._parameters[task]) is not None for task in tasks
        )

    def close(self) -> None:
        """Release all gradients."""
        for parameter in self._parameters:
            access_guards.held.pop(id(parameter), None)
