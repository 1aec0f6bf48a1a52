"""The training thread's side of a scheduled step: gradients go out, and come back when somebody asks.

    hook: gradient i complete ──▶ flat buffer, × 1/N ──▶ READY          .grad is empty, and `access_guards.held` knows
    why end of the pass: what did not come is unused here
    step(): the optimizer's updates are wanted, and happen as sums land
    .grad read before step(): all of it is fetched; step() is then the optimizer's own, at once

A *round* is one exchange of every task, once. A training step is one round, unless gradients are accumulated again
after they were sent; then it is two, and the second adds to the sums of the first, as DistributedDataParallel does
when backward() is called twice without no_sync.

# Note [Rounds and passes]
Which rounds there are must not depend on what one rank alone sees, such as which branches it takes. All ranks run the
same number of backward passes per step, so these decide. As many as the last step had are expected again; all but the
last of them only accumulate; in the last each gradient is sent as soon as it is complete, and at its end the rest. Then
every further pass is one more round. A step with fewer passes sends at step(), and the next one expects so many.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Protocol

import torch
from torch import nn, optim

from foretrain.comm.coordinator.protocol import CoordinatedExchange
from foretrain.plugins.torch import access_guards
from foretrain.plugins.torch.deferred_optimizer import Update
from foretrain.plugins.torch.gradient_buffer import GradientBuffer
from foretrain.plugins.torch.streams import HostStreams
from foretrain.plugins.torch.warmup import refuse_sparse


class UpdateSink(Protocol):
    """What applies updates later: `foretrain.plugins.torch.deferred_optimizer.DeferredOptimizer`, and a simulated
    rank's own."""

    def sent(self, task: int) -> None:
        """The sum of ``task`` is under way."""
        ...

    def want(self, update: Update) -> None:
        """``update`` is to be applied as the sums it needs are there."""
        ...

    def was_used(self, task: int) -> bool:
        """Return whether any rank had a gradient for ``task``; its sum must be there."""
        ...

    def wait(self, key: int) -> None:
        """Returns when the parameter with id ``key`` may be used."""
        ...

    def wait_free(self, task: int) -> None:
        """Returns when the buffer of ``task`` may be written."""
        ...

    def wait_all(self) -> None:
        """Returns when all sums are there and all that was wanted is applied."""
        ...

    def wait_wanted(self) -> None:
        """Returns when all that was wanted is applied."""
        ...


class GradientLocation(IntEnum):
    """What the flat buffer is to a parameter's ``.grad``."""

    NO = 0
    """Nothing: ``.grad`` is what it is."""
    SUM = 1
    """The sum that is, or will be, in the buffer is the gradient."""
    ABSENT = 2
    """This rank had none that was new. If another had one, the sum is the gradient; else ``.grad`` is what it is."""


class GradientDispatcher:
    """Also a `access_guards.Holder`. One thread at a time: the training thread, or the autograd engine's on its behalf.

    Args:
        parameters: indexed by task.
        gradients: their flat buffers.
        fires: per task, how often its gradient accumulates in one backward pass before it is complete.
        passes: backward passes per step, to begin with; see Note [Rounds and passes].
        exchange: told what is ready.
        updates: does what is deferred.
        streams: of the model's device.
        ranks: N.
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
        """Whether a round has begun since gradients were last asked for."""
        self._again = False
        """Whether it has since the last step."""
        self._pass = -1
        self._passed = 0
        """Passes since gradients were last asked for."""
        self._fired = [0] * count
        self._sent = [False] * count
        self._held = [GradientLocation.NO] * count
        self._local: set[int] = set()
        """Accumulated here, and not sent, since they were last cleared."""
        self._dropped: set[int] = set()
        """Cleared since the round began, after they were sent."""
        self._zeros: set[int] = set()
        """Cleared to zeros that are not there yet."""
        self._stepped: set[int] = set()

    # ── backward ──

    def gradient(self, task: int, synchronizes: bool) -> None:
        """A gradient was accumulated into ``.grad``."""
        if not synchronizes:
            self._finish()
            self._local.add(task)
            self._recall(task)
            return
        if not self._open or self._pass != access_guards.passes:
            self._begin_pass()
        elif self._sent[task]:
            # More often in one pass than ever before.
            self._expected[task] = self._fired[task] + 1
            self._finish()
            self._begin()
        self._fired[task] += 1
        if self._sends and self._fired[task] >= self._expected[task]:
            self._send(task)

    def _begin_pass(self) -> None:
        if self._open and self._sends:
            # The pass before did not come to its end.
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
        self._exchange.open(self.rounds, self._again)
        self._again = True
        self.rounds += 1

    def _send(self, task: int) -> None:
        """Hands the gradient of ``task`` over."""
        with torch.no_grad():
            self._contribute(task)
        access_guards.set_raw_grad(self._parameters[task], None)
        self._hand_over(task, GradientLocation.SUM)

    def _hand_over(self, task: int, held: GradientLocation) -> None:
        self._sent[task] = True
        self._held[task] = held
        self._zeros.discard(task)
        self._local.discard(task)
        self._dropped.discard(task)
        self._updates.sent(task)
        self._streams.ready(task)
        self._exchange.ready(task, held is GradientLocation.SUM)

    def _contribute(self, task: int) -> None:
        """``.grad`` / N into the buffer, as DistributedDataParallel divides before it sums."""
        view, gradient = self._views[task], access_guards.raw_grad(self._parameters[task])
        assert gradient is not None
        refuse_sparse(gradient)
        self._updates.wait_free(task)
        if self._is_sum(task):
            # The last sum was never cleared: the new gradient is added to it, as it would be in .grad.
            view.add_(gradient.detach())
            view.mul_(self._share)
        else:
            torch.mul(gradient.detach(), self._share, out=view)

    def _is_sum(self, task: int) -> bool:
        """Return whether a landed task's buffer is its parameter's gradient."""
        held = self._held[task]
        return held is GradientLocation.SUM or (held is GradientLocation.ABSENT and self._updates.was_used(task))

    def _recall(self, task: int) -> None:
        """Under no_sync: the old sum must be in ``.grad`` when more is added to it."""
        if self._held[task] is not GradientLocation.NO:
            self._updates.wait_free(task)
            fresh = access_guards.raw_grad(self._parameters[task])
            if self._is_sum(task) and fresh is not None:
                with torch.no_grad():
                    self._views[task].add_(fresh)
            self._return(task)

    # ── between backward and step ──

    def fetch(self) -> None:
        """Brings all gradients back into ``.grad``, summed, and applies every update asked for."""
        self.finish()
        self._fresh = False
        self._updates.wait_all()
        for task, held in enumerate(self._held):
            if held is not GradientLocation.NO:
                self._return(task)
        for task in tuple(self._zeros):
            self._put_zeros(task)

    def _return(self, task: int) -> None:
        if self._is_sum(task):
            access_guards.set_raw_grad(self._parameters[task], self._views[task])
        access_guards.held.pop(id(self._parameters[task]), None)
        self._held[task] = GradientLocation.NO

    def drop(self, key: int, zeros: bool) -> None:
        """Forgets one gradient; what is under way arrives and is not looked at."""
        task = self._task_of[key]
        zeros = zeros and self._has_gradient(task)
        if self._sent[task] or self._held[task] is not GradientLocation.NO:
            self._dropped.add(task)
        self._held[task] = GradientLocation.NO
        self._local.discard(task)
        access_guards.set_raw_grad(self._parameters[task], None)
        if zeros:
            self._zeros.add(task)
        elif not self._open:
            access_guards.held.pop(key, None)

    def _has_gradient(self, task: int) -> bool:
        """Return whether ``.grad``, if it were looked at, would be a tensor."""
        if self._held[task] is GradientLocation.ABSENT:
            self._updates.wait_free(task)
        return (
            task in self._zeros
            or self._held[task] is GradientLocation.SUM
            or access_guards.raw_grad(self._parameters[task]) is not None
            or self._is_sum(task)
        )

    def _put_zeros(self, task: int) -> None:
        self._zeros.discard(task)
        access_guards.held.pop(id(self._parameters[task]), None)
        access_guards.set_raw_grad(self._parameters[task], torch.zeros_like(self._parameters[task]))

    def settled(self) -> None:
        """What optimizers keep belongs to their last step(): so it does, wherever that is only done when asked for."""

    def finish(self) -> None:
        """There will be no further pass before gradients are asked for, or more is added to them locally."""
        self._finish()
        if self._passed:
            self._passes, self._passed = self._passed, 0

    @property
    def partly_sent(self) -> bool:
        """Return whether a round is open that other gradients of this rank may still belong to."""
        return self._open and not all(self._sent)

    def _finish(self) -> None:
        """The round is over: what has not come is unused here."""
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
                # Never cleared and unused now: the old sum stays, unless another rank sends a new one. That is to be
                # added to the old, of which this rank sends its part.
                refuse_sparse(gradient)
                if gradient.data_ptr() == view.data_ptr():
                    access_guards.set_raw_grad(self._parameters[task], view.clone())
                torch.mul(gradient, self._share, out=view)
        self._hand_over(task, GradientLocation.ABSENT)

    # ── step ──

    def step(self, place: int, optimizer: optim.Optimizer, tasks: dict[int, int]) -> bool:
        """Defers the step of ``optimizer``, the ``place``-th; False where the caller must do it now.

        Args:
            place: which of the attached optimizers.
            optimizer: it.
            tasks: its tasks, each with the index of its parameter group.
        """
        fresh = self._fresh or (bool(self._stepped) and place not in self._stepped)
        self.finish()
        self._fresh = False
        if not fresh or self._other_gradients(tasks):
            return self._step_now()
        self._stepped.add(place)
        self.stepped()
        groups = tuple(snapshot(group) for group in optimizer.param_groups)
        asked = self._streams.asked(v for group in groups for v in group.values() if isinstance(v, torch.Tensor))
        self._updates.want(Update(optimizer, groups, tasks, self.rounds - 1, asked))
        return True

    def _step_now(self) -> bool:
        """What is to be stepped is not, or not only, what was sent."""
        self.fetch()
        return False

    def stepped(self) -> None:
        """An optimizer's step was done, or is wanted: the next round is the first of another."""
        self._again = False

    def _other_gradients(self, tasks: dict[int, int]) -> bool:
        """Return whether gradients of ``tasks`` are not in the buffers: cleared, kept, or put there by hand."""
        return not self._dropped.isdisjoint(tasks) or any(
            access_guards.raw_grad(self._parameters[task]) is not None for task in tasks
        )

    def close(self) -> None:
        """Forgets everything that is held."""
        for parameter in self._parameters:
            access_guards.held.pop(id(parameter), None)


def snapshot(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group's settings as they are now: its scheduler must not change a step that is still to come."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }
