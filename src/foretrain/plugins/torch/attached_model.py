"""A model whose communication is scheduled, in the two phases of its life.

    watching      everything is reduced after backward(), and observed          `Warmup`, `StepObserver`
    scheduling    what the observation was turned into exchanges gradients      `Machinery`

Hooks of the model and calls of its optimizers arrive here and go on to the phase in hand. Where gradients go from there
is a subclass's: `foretrain.plugins.torch.attached` has real links, `foretrain.live.device.simulated_ddp` simulated
ones.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

import torch
import torch.distributed as dist
from torch import nn, optim

from foretrain.comm.observation import StepObserver
from foretrain.comm.options import AttachOptions
from foretrain.comm.run_trace import RunTrace
from foretrain.errors import ConfigError
from foretrain.plugins.torch import access_guards, rendezvous
from foretrain.plugins.torch.control_group import Buffers
from foretrain.plugins.torch.gradient_dispatcher import GradientDispatcher, UpdateSink
from foretrain.plugins.torch.hooks import (
    Handle,
    Hook,
    after_forward,
    before_forward,
    entrances,
    hide_from_compiler,
    remove_all,
)
from foretrain.plugins.torch.optimizers import OptimizerHooks
from foretrain.plugins.torch.warmup import Warmup
from foretrain.schedule import Bound, Spec
from foretrain.units import Time
from foretrain.workload.recorder import stopwatch

_taken: set[int] = set()
"""Ids of all parameters that are attached."""


class Scheduling(Protocol):
    """What exchanges gradients and applies updates once the steps have been watched."""

    @property
    def scheduled(self) -> GradientDispatcher:
        """The training thread's side."""
        ...

    @property
    def updates(self) -> UpdateSink:
        """What applies updates."""
        ...

    def close(self, reason: str | None = None) -> None:
        """Ends; ``reason`` where work is given up."""
        ...


MachineryT = TypeVar("MachineryT", bound=Scheduling)


class AttachedModel(ABC, Generic[MachineryT]):
    """A model that is watched, then scheduled. Use as a context manager, or call `close`.

    A subclass calls `_take`, and `_begin` when the other ranks may begin, too.

    Args:
        model: what is trained.
        group: the ranks that train.
        options: attach's arguments.
        trace: keeps a timeline; None keeps none.

    Attributes:
        model: what is trained.
        rank: this process's in the group.
        ranks: N.
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup | None, options: AttachOptions, trace: RunTrace | None = None
    ) -> None:
        self.model, self._options, self._trace = model, options, trace
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._schedule: Spec | None = None
        self._barrier = False
        self._bound: Bound | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._syncs = self._syncs_now = True
        self._step_over = False
        self._warmup: Warmup | None = None
        self._machinery: MachineryT | None = None
        self._unseen: list[int] = []
        """Ids of parameters that no module is seen to use, though gradients come for them."""
        self._hooks: list[Handle] = []
        self._gradient_hooks: list[Handle] = []
        self._named: list[tuple[str, nn.Parameter]] = []
        self._frozen: list[nn.Parameter] = []
        self._attachments: list[OptimizerHooks] = []
        self._task_of: dict[int, int] = {}
        self._device = rendezvous.device_of([p for p in model.parameters() if p.requires_grad])
        self._own = {id(parameter) for parameter in model.parameters()}
        for name, parameter in model.named_parameters():
            if id(parameter) in _taken:
                raise ConfigError("model", name, "is attached already", "close() the other attachment first")

    # ── for people ──

    @property
    def schedule(self) -> Spec | None:
        """The policy and knobs in force; None while the first steps are observed."""
        return self._schedule

    @property
    def bound(self) -> Bound | None:
        """T* of the observed step on the measured network; None before, for a single rank, and in a simulated one."""
        return self._bound

    @property
    def apart(self) -> bool:
        """Return whether ranks may be in different steps, so that nothing may wait for all of them."""
        return self._options.asynchronous

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients accumulate here and are not sent; use it for all but the last of several backward passes.

        As with DistributedDataParallel, forward and backward pass both belong inside, and all ranks enter alike.
        """
        if self._machinery is not None:
            self._machinery.scheduled.finish()
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def synchronize(self) -> None:
        """Waits until every gradient is summed and in ``.grad``, and every update asked for is applied."""
        self._raise_failure()
        self.gather()

    def share_buffers(self) -> None:
        """Rank 0's buffers, on all ranks, now: what all need for the same evaluation. Collective.

        Where ranks may be lost (``elastic``) nothing happens once steps are scheduled: buffers are each rank's own.
        """
        self._raise_failure()
        if not self._by_itself:
            self._buffers.share()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._abandon(f"{type(error).__name__}: {error}")

    # ── from the optimizers ──

    def defer(self, place: int, optimizer: optim.Optimizer, tasks: dict[int, int]) -> bool:
        """Defers a step; False where it must be done now, all gradients being back."""
        self._raise_failure()
        if self._machinery is not None and self._options.updates == "servers":
            self._machinery.scheduled.step(place, optimizer, tasks)
            if self._barrier:
                self._machinery.updates.wait_wanted()
            return True
        if self._machinery is not None and not self._barrier:
            return self._machinery.scheduled.step(place, optimizer, tasks)
        self.gather()
        return False

    def stepped(self, took: Time) -> None:
        """A whole step was done in ``took`` ps."""
        if self._machinery is None:
            self._observation.updated(took)
            self._step_over = True
            return
        self._machinery.scheduled.stepped()
        if self._trace is not None:
            self._trace.update(took)

    def gather(self) -> None:
        """Brings gradients back and applies everything asked for."""
        self._raise_failure()
        if (phase := self._phase) is not None:
            phase.fetch()

    def flush(self) -> None:
        """Applies every update asked for; gradients that wait for step() stay under way."""
        if self._machinery is not None and not self._closed and self._failure is None:
            self._machinery.updates.wait_wanted()

    def whole(self, why: str) -> None:
        """Brings gradients back for a step that is not to be deferred; ConfigError where only servers have them."""
        if self._options.updates == "servers":
            raise ConfigError("optimizer", "step()", f"cannot run on servers: {why}", "write updates='workers'")
        self.gather()

    def saves(self, place: int) -> None:
        """An optimizer's state is to be read: applies everything asked for, and sees to it that it is here."""
        self.flush()

    def saved(self, place: int) -> None:
        """It was read."""

    def loads(self, place: int) -> None:
        """It is to be replaced."""
        self.flush()

    def regrouped(self) -> None:
        """A parameter group was added: the tasks may be others now."""
        self._restart()

    # ── the model's hooks ──

    def _take(self) -> None:
        """Nobody else may attach these parameters; what uses them is seen from here on."""
        _taken.update(self._own)
        access_guards.install()

    def _begin(self, optimizers: Sequence[optim.Optimizer], gradients: dist.ProcessGroup, buffers: Buffers) -> None:
        """Watches; ``gradients`` are summed in that group, and ``buffers`` shared."""
        self._gradient_group, self._buffers = gradients, buffers
        self._attachments += [OptimizerHooks(place, optimizer, self) for place, optimizer in enumerate(optimizers)]
        self._watch_model()
        self._observe()

    def _list_parameters(self) -> None:
        everything = list(self.model.named_parameters())
        # What has no elements has nothing to send, and an order of bytes has no place for it.
        self._named = [(name, p) for name, p in everything if p.requires_grad and p.numel()]
        self._frozen = [parameter for _, parameter in everything if not parameter.requires_grad]

    def _watch_model(self) -> None:
        flush = Hook(self.flush)
        for module in self.model.modules():
            self._hooks.append(module.register_state_dict_pre_hook(flush))
            self._hooks.append(module.register_load_state_dict_pre_hook(flush))
        # The root's come first among its own, so that a forward pass has begun when the others see it.
        self._hooks.append(before_forward(self.model, self._begin_forward))
        names = {module: name for name, module in self.model.named_modules()}
        for module, parameters in entrances(self.model):
            keys, name = tuple(id(parameter) for parameter in parameters), names.get(module) or "(root)"
            self._hooks.append(before_forward(module, lambda keys=keys, name=name: self._enter(keys, name)))
        self._hooks.append(after_forward(self.model, self._end_forward))
        hide_from_compiler()

    def _observe(self) -> None:
        """Begins, or begins again, with steps that are watched."""
        parameters = [parameter for _, parameter in self._named]
        self._observation = StepObserver(len(parameters), stopwatch({self._device}))
        self._warmup = Warmup(parameters, self._gradient_group, self._observation, self._together)
        self._step_over = False
        task_of = {id(parameter): task for task, parameter in enumerate(parameters)}
        for attachment in self._attachments:
            attachment.assign(task_of)
        access_guards.watching.update(dict.fromkeys(task_of, self._use))
        self._task_of = task_of
        for task, parameter in enumerate(parameters):
            hook = parameter.register_post_accumulate_grad_hook(lambda _, task=task: self._gradient(task))
            self._gradient_hooks.append(hook)

    def _enter(self, keys: Sequence[int], name: str) -> None:
        """A module that owns the parameters with these ids begins its forward pass."""
        # The model may be trained by its parts alone: then none but they say whether the backward pass synchronises.
        # What is computed once more for a backward pass (checkpointing) says nothing: it belongs to an earlier one.
        if self._syncs_now is not self._syncs and torch.is_grad_enabled() and torch._C._current_graph_task_id() < 0:
            self._syncs_now = self._syncs
        asked = self._trace.now() if self._trace is not None else 0
        if access_guards.pending_updates or access_guards.watching:
            for key in keys:
                access_guards.touch(key)
        if self._trace is not None:
            self._trace.enter(name, asked)

    def _use(self, key: int) -> None:
        self._observation.use(self._task_of[key])

    def _begin_forward(self) -> None:
        if self._failure is not None:
            self._raise_failure()
        trains = torch.is_grad_enabled()
        if trains and self._machinery is None:
            self._step_ends()
            if any(parameter.requires_grad for parameter in self._frozen):
                self._restart()
            self._observation.begin_forward()
        elif trains and self._frozen and any(parameter.requires_grad for parameter in self._frozen):
            self._restart()
        for key in self._unseen:
            access_guards.touch(key)
        if trains:
            if self._options.broadcast_buffers and not (self.apart or self._by_itself):
                self._buffers.forward_begins(self._syncs)
            self._syncs_now = self._syncs
        if self._trace is not None and trains:
            self._trace.begin_forward()

    def _end_forward(self) -> None:
        if not torch.is_grad_enabled():
            return
        if self._machinery is None:
            self._observation.end_forward()
        else:
            # What the forward pass did not ask for must not be written any more while gradients are made from it.
            self._machinery.updates.wait_wanted()
        if self._trace is not None:
            self._trace.end_forward()

    def _gradient(self, task: int) -> None:
        if self._failure is not None:
            self._raise_failure()
        if self._trace is not None:
            self._trace.gradient(task)
        if self._machinery is None:
            self._step_ends()
        if (phase := self._phase) is not None:
            phase.gradient(task, self._syncs_now)

    # ── from watching to scheduling, and back ──

    @property
    def _phase(self) -> GradientDispatcher | Warmup | None:
        return self._warmup if self._machinery is None else self._machinery.scheduled

    @property
    def _by_itself(self) -> bool:
        """Return whether this rank waits for no other one but through what exchanges gradients."""
        return self._options.elastic and self._machinery is not None

    def _step_ends(self) -> None:
        """After the last optimizer of a watched step: the next forward pass, or gradient, tells."""
        if not self._step_over:
            return
        self._step_over = False
        self._observation.end_step()
        if self._observation.steps >= self._options.warmup:
            self._schedule_from_now()

    def _schedule_from_now(self) -> None:
        self.gather()
        self._stop_watching()
        self._unseen = [id(self._named[task][1]) for task in self._observation.unseen()]
        self._machinery, views = self._assemble()
        if self._warmup is not None:
            self._warmup.hand_over(views)
            self._warmup = None

    def _restart(self) -> None:
        """Other parameters take part from now on: watch again, then schedule again. Collective."""
        self.gather()
        self._stop_scheduling()
        self._stop_watching()
        self._list_parameters()
        self._connect()
        self._observe()

    def _stop_scheduling(self, reason: str | None = None) -> None:
        remove_all(self._gradient_hooks)
        self._gradient_hooks.clear()
        if self._machinery is not None:
            self._machinery.close(reason)
            self._machinery = None

    def _stop_watching(self) -> None:
        for key in self._task_of:
            access_guards.watching.pop(key, None)

    def _let_go(self) -> None:
        """Gives model and optimizers back."""
        for attachment in self._attachments:
            attachment.close()
        remove_all(self._hooks)
        self._stop_watching()
        for key in self._task_of:
            access_guards.held.pop(key, None)
        _taken.difference_update(self._own)
        access_guards.remove()

    # ── what a subclass says ──

    @abstractmethod
    def close(self) -> None:
        """Applies everything under way and gives model and optimizers back as they were. Idempotent."""

    @abstractmethod
    def _assemble(self) -> tuple[MachineryT, Sequence[torch.Tensor]]:
        """What exchanges gradients from now on, as was observed, and its views of them, per task."""

    @abstractmethod
    def _connect(self) -> None:
        """Who is lost is noticed from here on."""

    @abstractmethod
    def _together(self) -> None:
        """For whoever waits for all ranks: raises what keeps them from coming."""

    @abstractmethod
    def _raise_failure(self) -> None:
        """Raises what has ended the job, if anything has."""

    @abstractmethod
    def _abandon(self, reason: str | None = None) -> None:
        """Ends without waiting for anything; ``reason`` where work is given up."""
